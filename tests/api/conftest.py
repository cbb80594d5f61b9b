import pytest
from problem import children, write_problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("problem")
    write_problem(path)
    return path


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    yield
    assert not children()
