"""One start of a tiny Llama with random weights on two CPU workers: load, generate, say what came.

python start.py MODEL_DIRECTORY
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")

from vllm import LLM, SamplingParams

PROMPTS = ([1, 5, 9, 13], [1, 7], [3] * 40)


def main() -> None:
    llm = LLM(
        model=sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=int(os.environ.get("TENSOR_PARALLEL_SIZE", "2")),
        worker_cls="troubled.Troubled",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=64 * 2**20,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print("CAME " + json.dumps({"tokens": tokens, "blocks": blocks}), flush=True)


if __name__ == "__main__":
    main()
