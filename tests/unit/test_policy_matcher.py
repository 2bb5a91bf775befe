"""The pattern grammar: what it matches, what it refuses, and that it does what a slow reference does."""

from __future__ import annotations

import pytest
from ringfence.policy.matcher import (
    PatternError,
    canonical_path,
    canonical_url,
    compile_pattern,
    match_key,
    match_name,
    match_path,
    match_table,
    match_url,
    match_url_path,
    subject,
)

PATHS = [
    ("/workspace/a", "/workspace/a", True),
    ("/workspace/a", "/workspace/a/b", False),
    ("/workspace/a", "/workspace/ab", False),
    ("/workspace/a/**", "/workspace/a", True),
    ("/workspace/a/**", "/workspace/a/b/c", True),
    ("/workspace/a/**", "/workspace/ab", False),
    ("/workspace/*", "/workspace/a", True),
    ("/workspace/*", "/workspace/a/b", False),
    ("/workspace/*", "/workspace", False),
    ("/workspace/*", "/workspace/.env", True),
    ("/workspace/*.py", "/workspace/a.py", True),
    ("/workspace/*.py", "/workspace/.py", True),
    ("/workspace/*.py", "/workspace/d/a.py", False),
    ("/workspace/a*b*c", "/workspace/aXbYc", True),
    ("/workspace/a*b*c", "/workspace/acb", False),
    ("/workspace/a*a", "/workspace/a", False),
    ("/workspace/**/x", "/workspace/x", True),
    ("/workspace/**/x", "/workspace/a/b/x", True),
    ("/workspace/**/x", "/workspace/a/b/xx", False),
    ("/workspace/**/a/**/b", "/workspace/a/a/c/b", True),
    ("**/.env", "/workspace/.env", True),
    ("**/.env", "/workspace/a/b/.env", True),
    ("**/.env", "/workspace/a/.env/c", False),
    ("**/.env", "/workspace/a/x.env", False),
    ("**/.env/**", "/workspace/a/.env/c", True),
    ("**", "/workspace/a", True),
    ("out/*", "/workspace/out/a", True),
    ("./out/**", "/workspace/out", True),
    (r"/workspace/\*", "/workspace/*", True),
    (r"/workspace/\*", "/workspace/a", False),
    (r"/workspace/\[id\].tsx", "/workspace/[id].tsx", True),
    ("/workspace/a.b", "/workspace/aXb", False),
    ("/workspace/a+", "/workspace/aa", False),
    ("/workspace/a|b", "/workspace/a", False),
    ("/workspace/(a)", "/workspace/a", False),
    ("/workspace/A", "/workspace/a", False),
    # C08: a sibling that shares the prefix.
    ("/srv/share", "/srv/share-secret/a", False),
    ("/srv/share/**", "/srv/share-secret/a", False),
    ("/srv/share*", "/srv/share-secret/a", False),
    # One letter in two spellings is one letter, in the pattern and in the path.
    ("/workspace/e\u0301", "/workspace/\u00e9", True),
    ("/workspace/\u00e9", "/workspace/e\u0301", True),
]


@pytest.mark.parametrize(("pattern", "path", "expected"), PATHS)
def test_paths(pattern: str, path: str, expected: bool) -> None:
    assert match_path(pattern, path) is expected


@pytest.mark.parametrize(
    "path", ["/workspace/a/../b", "../b", "/workspace/a\u200bb", "/workspace/a\nb", "", "a\0"]
)
def test_paths_without_a_canonical_form_match_nothing(path: str) -> None:
    assert match_path("**", path) is False
    with pytest.raises(PatternError):
        canonical_path(path)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("/workspace/a/", "ends in a slash"),
        ("/workspace//a", "empty segment"),
        ("/workspace/../a", "`..`"),
        ("/workspace/./a", "`.`"),
        ("/workspace/a**", "whole segment"),
        ("/workspace/***", "whole segment"),
        ("/workspace/*.{pem,key}", "`{`"),
        ("/workspace/file?", "`?`"),
        ("/workspace/[ab]", "`[`"),
        ("/workspace/a\\", "no escape"),
        ("/workspace/a\\d", "no escape"),
        ("~/x", "`~`"),
        ("!/workspace/x", "`!`"),
        ("$HOME/x", "`$`"),
        ("/", "no path pattern"),
        (".", "no path pattern"),
        ("", "empty"),
        ("/workspace/a\u200b", "invisible"),
        ("/workspace/a\tb", "control"),
    ],
)
def test_path_patterns_that_are_refused_say_why_and_what_to_do(pattern: str, said: str) -> None:
    with pytest.raises(PatternError) as caught:
        compile_pattern("path", pattern)
    assert said in caught.value.message
    assert caught.value.fix


API = "https://api.example.com"
URLS = [
    (f"{API}/v1/*", f"{API}/v1/items", True),
    # C09
    (f"{API}/v1/*", f"{API}/v1/admin/secrets", False),
    (f"{API}/v1/*", f"{API}/v1//x", False),
    (f"{API}/v1/*", f"{API}/v1/%2e%2e/admin", False),
    (f"{API}/v1/*", f"{API}/v1/../admin", False),
    (f"{API}/v1/*", f"{API}/V1/items", False),
    (f"{API}/v1/*", "https://API.Example.com./v1/items", True),
    (f"{API}/v1/*", "HTTPS://api.example.com:443/v1/items", True),
    (f"{API}/v1/*", f"{API}/v1/a%2Fb", False),
    (f"{API}/v1/*", f"{API}/v1/a%5cb", False),
    (f"{API}/v1/*", f"{API}/v1/%252e%252e", False),
    (f"{API}/v1/*", f"{API}/v1/%00", False),
    (f"{API}/v1/*", f"{API}/v1/%ff", False),
    (f"{API}/v1/*", f"{API}/v1/%e2%80%8b", False),
    (f"{API}/v1/*", f"{API}/v1/%zz", False),
    (f"{API}/v1/*", f"{API}/v1/a%20b", True),
    (f"{API}/v1/*", f"{API}/v1/%69tems", True),
    (f"{API}/v1/items", f"{API}/v1/%69tems", True),
    (f"{API}/v1/*", f"{API}/v1/", False),
    (f"{API}/v1/*", f"{API}/v1/items/", True),
    (f"{API}/v1/*", f"{API}/v1/items?x=1#f", True),
    (f"{API}/v1/*", "http://api.example.com/v1/items", False),
    (f"{API}/v1/*", f"{API}:8443/v1/items", False),
    (f"{API}:*/v1/*", f"{API}:8443/v1/items", True),
    (f"{API}/v1/*", "https://api.example.com@evil.test/v1/items", False),
    (f"{API}/v1/*", "https://api.example.com\\@evil.test/v1/items", False),
    (f"{API}/v1/*", "https://api.example.com.evil.test/v1/items", False),
    (f"{API}/v1/**", f"{API}/v1", True),
    (f"{API}/v1/**", f"{API}/v1/a/b", True),
    (f"{API}/v1/**", f"{API}/v1x", False),
    (API, API, True),
    (API, f"{API}/a", False),
    (f"{API}/a%2Ab", f"{API}/a*b", True),
    (f"{API}/a%2Ab", f"{API}/aXb", False),
    ("https://*.example.com/", "https://a.example.com/", True),
    ("https://*.example.com/", "https://a.b.example.com/", False),
    ("https://*.example.com/", "https://example.com/", False),
    ("https://**.example.com/", "https://a.b.example.com/", True),
    # C10: a host pattern that one of validator and engine refused elsewhere.
    ("https://*-svc.example.test/**", "https://pay-svc.example.test/x", True),
    ("https://*-svc.example.test/**", "https://svc.example.test/x", False),
    ("http://127.0.0.1:9000/**", "http://127.0.0.1:9000/pay", True),
    ("http://127.0.0.1:9000/**", "http://127.1:9000/pay", False),
    ("http://127.0.0.1/**", "http://2130706433/x", False),
    ("http://127.0.0.1/**", "http://0x7f.0.0.1/x", False),
    ("http://[::1]/**", "http://[0:0:0:0:0:0:0:1]/x", True),
    ("http://b\u00fccher.example/**", "http://xn--bcher-kva.example/a", True),
    ("http://xn--bcher-kva.example/**", "http://B\u00dcCHER.example/a", True),
    (f"{API}/q?kind=public", f"{API}/q?kind=public", True),
    (f"{API}/q?kind=public", f"{API}/q?kind=public&kind=secret", False),
    (f"{API}/q?kind=public", f"{API}/q", False),
    (f"{API}/q?kind=*&id=7", f"{API}/q?kind=x&id=7", True),
    (f"{API}/q?kind=*", f"{API}/q?kind=x&y=1", False),
    ("**", "http://anything.example/at/all?q", True),
]


@pytest.mark.parametrize(("pattern", "url", "expected"), URLS)
def test_urls(pattern: str, url: str, expected: bool) -> None:
    assert match_url(pattern, url) is expected


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/x",
        "http://h/a/../b",
        "http://h/a/./b",
        "http://h/%2e%2E",
        "http://user@h/",
        "//h/x",
        "h/x",
        "http:/h",
        "http://",
        "http://h:0/",
        "http://h:99999/",
        "http://h:/",
        "http://h:8 0/",
        "http://h:\u0661/",
        "http://a..b/",
        "http://a_b!/",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://::1/",
        "http://h/a b",
        "http://h\u3002evil.test:x/",
        "http://h/a\u202eb",
        "http://h/?%",
        "http://h%2eevil/",
        "http://1.2.3.4.5/",
        "http://127.0.0.01/",
        "http://xn--a\u00fc.example/",
        " http://h/",
    ],
)
def test_urls_that_clients_read_in_several_ways_are_refused(url: str) -> None:
    with pytest.raises(PatternError):
        canonical_url(url)


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("HTTP://Example.COM.:80", "http://example.com/"),
        ("http://h/a%7eb", "http://h/a~b"),
        ("http://h/%61%2A", "http://h/a*"),
        ("http://h/\u00e9", "http://h/%C3%A9"),
        ("http://h/e%cc%81", "http://h/%C3%A9"),
        ("http://h/a/?q=%3d&\u00e9#x", "http://h/a/?q=%3D&%C3%A9"),
        ("http://h/100%25", "http://h/100%25"),
    ],
)
def test_canonical_urls(url: str, canonical: str) -> None:
    assert canonical_url(url) == canonical
    assert canonical_url(canonical) == canonical


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("https://h/a/", "ends in a slash"),
        ("https://h/a**", "whole segment"),
        ("https://h/[a]", "`[`"),
        ("https://h/{a}", "`{`"),
        ("https://h/../a", "`..`"),
        ("https://h/a#b", "fragment"),
        ("https://*\u00fc.example/", "ASCII"),
        ("https://a b/", "space"),
        ("*://h/", "http"),
        ("https://***.h/", "whole segment"),
    ],
)
def test_url_patterns_that_are_refused_say_why_and_what_to_do(pattern: str, said: str) -> None:
    with pytest.raises(PatternError) as caught:
        compile_pattern("url", pattern)
    assert said in caught.value.message
    assert caught.value.fix


def test_names_keys_and_tables() -> None:
    assert match_name("gpt-*", "gpt-5")
    assert not match_name("gpt-*", "gpt")
    assert match_name("*", "meta/llama-3")
    assert not match_name("gpt-4.1", "gpt-4x1")
    assert match_key("jobs/*", "jobs/1")
    assert not match_key("jobs/*", "jobs/1/log")
    assert match_key("jobs/**", "jobs")
    assert not match_key("jobs", "jobs/")
    assert not match_key("jobs/*", "jobs/")
    assert match_table("crm", "crm/anything")
    assert match_table("crm/invoices", "crm/public.invoices")
    assert match_table("crm/public.invoices", "crm/invoices")
    assert not match_table("crm/invoices", "crm/hr.invoices")
    assert match_table("crm/hr.*", "crm/hr.people")
    assert not match_table("crm/*", "crm/hr.people")
    assert not match_table("crm/invoices", "crmx/invoices")
    assert match_url_path("/jobs/**", "/jobs/1/log")
    assert not match_url_path("/pay", "/payments")


def test_a_database_alone_is_allowed_by_any_rule_on_it_and_denied_only_by_one_on_all_of_it() -> None:
    database = subject("table", "crm")
    some, everything = compile_pattern("table", "crm/invoices"), compile_pattern("table", "crm")
    assert some.permits(database)
    assert not some.forbids(database)
    assert everything.permits(database)
    assert everything.forbids(database)


@pytest.mark.parametrize(
    ("kind", "resource"),
    [
        ("path", "/workspace/a/../b"),
        ("path", "/workspace//a"),
        ("path", "/workspace/a/"),
        ("path", "/etc/passwd"),
        ("path", "/workspacex"),
        ("path", "relative"),
        ("path", "/workspace/e\u0301"),
        ("path", ("a", "b")),
        ("url", "https://H/"),
        ("url", "https://h"),
        ("url", "https://h/%61"),
        ("key", "a\0b"),
        ("name", "a\u200bb"),
        ("command", ()),
        ("command", ("",)),
        ("command", ("a", "b\0")),
    ],
)
def test_resources_that_are_not_canonical_are_refused(kind: str, resource: str | tuple[str, ...]) -> None:
    with pytest.raises(PatternError):
        subject(kind, resource)


def test_cost_does_not_explode_with_wildcards() -> None:
    # The count of comparisons is what matters; 2^40 of them would never end.
    many = "/".join(["**", "a"] * 40)
    assert not match_path(f"/workspace/{many}", "/workspace/" + "a/" * 300 + "b")
    assert not match_path("/workspace/" + "*a" * 40 + "b", "/workspace/" + "a" * 3000)
