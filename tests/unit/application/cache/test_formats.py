import pytest

from semantic.application.cache.formats import ServedFormat, StoredFormats
from semantic.domain.agents import Agent, AgentProfile, Pointer
from semantic.domain.blocks import BlockName, BlockNamespace, BlockOrigin

pytestmark = pytest.mark.unit

ABI, OLD_ABI = "torch.v1.bfloat16", "torch.v1.float32"
CHANGED = "KV cache was written in float32; the model now runs in bfloat16."


def root_of(tenant: str, abi: str = ABI, fingerprint: str = "model") -> BlockName:
    return BlockNamespace(fingerprint, f"{abi}/raw", tenant.encode()).root()


OLD = root_of("local", OLD_ABI)
OTHER = root_of("local", fingerprint="other")


@pytest.fixture
def formats() -> StoredFormats:
    made = StoredFormats(
        [BlockOrigin(OLD, "model", OLD_ABI, "raw"), BlockOrigin(OTHER, "other", ABI, "raw")]
    )
    made.serve(ServedFormat("model", ABI, "raw", root_of), ["local"])
    return made


def test_nothing_is_compared_before_a_model_is_served() -> None:
    formats = StoredFormats([BlockOrigin(OLD, "model", OLD_ABI, "raw")])
    agent = Agent("ann", created_at=0.0)
    assert formats.root_for(agent, Pointer(OLD, OLD, 1)) == OLD
    assert formats.note("local", OLD) == formats.summary(lambda _: 1) == ""


def test_an_agent_looks_for_blocks_in_the_served_format(formats: StoredFormats) -> None:
    agent = Agent("ann", created_at=0.0)
    for root in (root_of("local"), OLD, OTHER):
        assert formats.root_for(agent, Pointer(root, root, 1)) == root_of("local")


def test_an_agent_with_a_model_of_its_own_finds_its_blocks_there(formats: StoredFormats) -> None:
    agent = Agent("ann", created_at=0.0, profile=AgentProfile(model="other"))
    assert formats.root_for(agent, Pointer(OTHER, OTHER, 1)) == OTHER
    assert formats.root_for(agent, Pointer(OLD, OLD, 1)) == root_of("local")


def test_the_difference_between_formats_is_reported(formats: StoredFormats) -> None:
    assert formats.note("local", root_of("local")) == ""
    assert formats.note("local", OLD) == CHANGED
    assert formats.note("local", OTHER) == "KV cache was written by another model."
    assert "another format" in formats.note("local", BlockName(bytes(32)))
    assert formats.note("new", root_of("new")) == ""


def test_the_summary_counts_the_served_models_blocks_that_are_there(
    formats: StoredFormats,
) -> None:
    sizes = {OLD: 3 * 2**20, OTHER: 7, root_of("local"): 9}
    assert formats.summary(sizes.__getitem__) == f"{CHANGED} 3.0 MB of it cannot be used."
    assert formats.summary(lambda _: 0) == ""
