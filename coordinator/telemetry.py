"""Prometheus metrics: read off the engines at each scrape, so they cannot drift from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.service import Service
from coordinator.views import agreed, last_word

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE = ["namespace", "engine"]


class Metrics(Collector):
    """Label values are engine names, class names and codes: bounded by what has joined."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        append = Histogram(
            "kvaccord_append_seconds",
            "Time until an entry was durable.",
            registry=self._registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )
        service.append_seconds = append.observe

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        rounds = GaugeMetricFamily(
            "kvaccord_rounds", "Rounds in the log, by how they ended.", labels=["state", "code"]
        )
        number = GaugeMetricFamily(
            "kvaccord_engine_round",
            "Number and state of the last round.",
            labels=[*ENGINE, "state"],
        )
        waiting = GaugeMetricFamily(
            "kvaccord_waiting_ranks", "Ranks that the last round waits for.", labels=ENGINE
        )
        entries = GaugeMetricFamily(
            "kvaccord_agreed_entries",
            "Agreed entries per cache class, in the round in force.",
            labels=[*ENGINE, "dp", "cache_class"],
        )
        stranded = GaugeMetricFamily(
            "kvaccord_stranded_bytes",
            "Memory given up because another rank has less, in the round in force.",
            labels=[*ENGINE, "dp"],
        )
        spread = GaugeMetricFamily(
            "kvaccord_spread_entries",
            "Most minus fewest page entries that a rank had room for, in the round in force.",
            labels=[*ENGINE, "dp"],
        )
        ended: Counter[tuple[str, str]] = Counter()
        for engine in self._service.engines:
            name = [engine.name.namespace, engine.name.engine]
            for round_ in engine.rounds.values():
                ended[round_.state, last_word(round_).get("code", "")] += 1
            if last := engine.last:
                number.add_metric([*name, last.state], last.number)
                waiting.add_metric(name, len(last.waiting_for))
            for row in agreed(engine.in_force)["schedulers"] if engine.in_force else ():
                at = str(row.get("dp", row.get("group")))
                for cache_class, count in row["entries"].items():
                    entries.add_metric([*name, at, cache_class], count)
                stranded.add_metric([*name, at], row["stranded_bytes"])
                spread.add_metric([*name, at], row["spread_entries"])
        for labels, count in ended.items():
            rounds.add_metric(list(labels), count)
        sessions = GaugeMetricFamily("kvaccord_sessions", "Sessions that are open.")
        sessions.add_metric([], self._service.presence.sessions)
        return [rounds, number, waiting, entries, stranded, spread, sessions]
