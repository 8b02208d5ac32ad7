"""Random work for the cache, the component and the planner on SGLang's own scheduler parts, checked after every step.

A longer search:  TAIL_REPLAY_SEARCH=1 pytest tests/radix/test_tree_properties.py tests/radix/test_host_tier.py
"""

import pytest
from server_machine import LONG, PROFILE, ServerMachine


class TestServer(ServerMachine.TestCase):
    settings = PROFILE


@pytest.mark.slow
class TestServerForLonger(ServerMachine.TestCase):
    settings = LONG
