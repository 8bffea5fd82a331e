from pathlib import Path

import pytest
from benchmark.endpoint import Endpoint, ServerError, ServerQueries
from benchmark.tokens import FileTokens, ServerTokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from tests.scripts.fake_server import FakeServer, in_a_thread


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_counts_what_it_puts_around_a_text(folder: Path) -> None:
    assert FileTokens(folder).count("a b a") == 4
    assert FileTokens(folder / "tokenizer.json").vocab_size == 3


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        FileTokens(tmp_path)


def test_the_server_counts_where_there_is_no_tokenizer() -> None:
    with in_a_thread(FakeServer(lambda _: [])) as url, ServerQueries(Endpoint.parse(url), None) as queries:
        assert ServerTokens(queries, "model").count("three short words") == 3


def test_a_server_that_does_not_count_is_an_error() -> None:
    with (
        ServerQueries(Endpoint.parse("http://127.0.0.1:1"), None) as queries,
        pytest.raises(ServerError, match="/tokenize"),
    ):
        ServerTokens(queries, "model").count("three short words")


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:8000", Endpoint("127.0.0.1", 8000, "", False)),
        ("http://localhost/v1/", Endpoint("localhost", 80, "", False)),
        ("https://api.example.com/proxy/v1", Endpoint("api.example.com", 443, "/proxy", True)),
    ],
)
def test_a_base_url_may_name_a_prefix_and_the_version(url: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(url) == endpoint


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert Endpoint.parse("http://[::1]:8000").authority == "[::1]:8000"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"base_url|[Pp]ort"):
        Endpoint.parse(url)
