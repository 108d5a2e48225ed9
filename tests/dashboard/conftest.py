"""Both ways of serving clients, as the data path's tests have them."""

from tests.proxy.conftest import mode as mode
