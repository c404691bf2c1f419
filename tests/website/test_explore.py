"""`minipar explore`: the site on loopback, or how to build it."""

from __future__ import annotations

import threading
import urllib.request

import pytest

from minipar.visualize.explore import FIRST_PAGE, server


def test_it_serves_the_site_on_loopback_alone(tmp_path):
    (tmp_path / FIRST_PAGE).parent.mkdir()
    (tmp_path / FIRST_PAGE).write_text("hello")
    with server(tmp_path) as running:
        assert running.server_address[0] == "127.0.0.1"
        threading.Thread(target=running.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{running.server_port}/{FIRST_PAGE}"
        assert urllib.request.urlopen(url).read() == b"hello"
        running.shutdown()


def test_a_site_that_is_not_built_says_how(tmp_path):
    with pytest.raises(ValueError, match="is not built; run `make site`"):
        server(tmp_path)


def test_a_port_that_cannot_be_is_refused(tmp_path):
    (tmp_path / FIRST_PAGE).parent.mkdir()
    (tmp_path / FIRST_PAGE).write_text("hello")
    with pytest.raises(ValueError, match="port=99999 cannot be used"):
        server(tmp_path, 99999)
    with server(tmp_path) as running, pytest.raises(ValueError, match="cannot be used"):
        server(tmp_path, running.server_port)
