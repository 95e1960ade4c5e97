// RFC 8785 by somebody else: ECMAScript's own numbers and strings, keys in the order of UTF-16.
// Reads one JSON document a line, answers the SHA-256 of its canonical form and its length in bytes.
const { createHash } = require("crypto");
const { createInterface } = require("readline");

function canonical(value) {
  if (Array.isArray(value)) return "[" + value.map(canonical).join(",") + "]";
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const keys = Object.keys(value).sort();
  return "{" + keys.map((key) => JSON.stringify(key) + ":" + canonical(value[key])).join(",") + "}";
}

createInterface({ input: process.stdin }).on("line", (line) => {
  const bytes = Buffer.from(canonical(JSON.parse(line)), "utf8");
  console.log("sha256:" + createHash("sha256").update(bytes).digest("hex") + " " + bytes.length);
});
