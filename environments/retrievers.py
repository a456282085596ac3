"""Which retriever a config means, and whether its keys go together."""

from __future__ import annotations

from dataclasses import dataclass

from rsipo_lightning.checks import at_least, one_of
from rsipo_lightning.environments.disk_retriever import DiskRetriever, check_installed
from rsipo_lightning.environments.http_retriever import PROTOCOLS, HTTPRetriever
from rsipo_lightning.environments.retriever import BM25Retriever, LocalRetriever, Retriever
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.protocols import EnvironmentConfig
from rsipo_lightning.web import check_url

LOCAL: dict[str, type[BM25Retriever] | type[DiskRetriever]] = {
    "bm25": BM25Retriever,
    "disk": DiskRetriever,
}


@dataclass
class RetrieverConfig(EnvironmentConfig):
    """Keys of an environment that searches passages."""

    # JSONL of passages: {id, title, text} or {id, contents}; with disk also the folder of an index
    corpus: str | None = None
    # bm25: `corpus` in memory | disk: an index of `corpus` that need not fit into memory |
    # http: a server (rsipo-retriever, Search-R1's)
    retriever: str = "bm25"
    retriever_url: str | None = None  # http://host:port of the server; its path is /retrieve
    retriever_protocol: str = "batch"  # batch: "queries", a list | single: one "query" a request
    retriever_timeout_s: float = 30  # for each request
    retriever_retries: int = 3  # after a failed connection, a timeout or a 5xx


def make_retriever(config: RetrieverConfig) -> Retriever:
    """The retriever over real passages. ``config`` has passed :func:`check_retriever`.

    A broken corpus or a server that does not answer: DataError.
    """
    if config.retriever in LOCAL:
        assert config.corpus
        return open_corpus(config.corpus, config.retriever)
    assert config.retriever_url
    return HTTPRetriever(
        config.retriever_url,
        config.retriever_timeout_s,
        config.retriever_retries,
        config.retriever_protocol,
    )


def open_corpus(corpus: str, index: str) -> LocalRetriever:
    """The corpus behind an index of kind ``bm25`` or ``disk``, which is built if there is none."""
    return LOCAL[index].from_file(corpus)


def check_retriever(config: RetrieverConfig, real: bool) -> None:
    """ConfigError or PluginError for keys that cannot be run; ``real``: the questions are."""
    one_of("env.retriever", config.retriever, [*LOCAL, "http"])
    one_of("env.retriever_protocol", config.retriever_protocol, PROTOCOLS)
    at_least("env.retriever_retries", config.retriever_retries, 0)
    if not 0 < config.retriever_timeout_s < 1e6:  # a socket takes no infinite one
        got = f"{config.retriever_timeout_s:g}"
        raise ConfigError(f"env.retriever_timeout_s={got}: must be above 0 and below 1e6")
    if config.retriever in LOCAL:
        if config.retriever_url:
            raise ConfigError("env.retriever_url is given: set env.retriever=http to use it")
        if real and not config.corpus:
            raise ConfigError(
                "env.questions is given without env.corpus: which passages are searched?"
            )
    else:
        if not config.retriever_url:
            raise ConfigError("env.retriever=http needs env.retriever_url=http://host:port")
        check_url("env.retriever_url", config.retriever_url)
        if config.corpus:
            raise ConfigError(
                "env.corpus is given with env.retriever=http: the server has the corpus"
            )
    if config.retriever == "disk":
        check_installed()
    if not real and config.retriever != "bm25":
        raise ConfigError(
            f"env.retriever={config.retriever} needs env.questions: the world has its own passages"
        )
