"""P13: a Llama with a classification head, whose labels only the last stage reads."""

import torch
import transformers

from autoshard.ir.graph_function import BATCH
from autoshard.testing.models import VOCAB, Built
from tests.bank.equal import assert_equal, finding, tamper

PLAN = """
mesh { pp = 2 }
batch { micro_batch_size = 2, num_microbatches = 2 }
pipeline { split = before(model.layers.1), schedule = zb_h1 }
"""


def classifier() -> Built:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, num_labels=3, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config).train()
    ids = torch.randint(1, VOCAB, (4, 8))
    ids[1, 5:] = 0  # padded: the last token that counts differs from row to row
    return model, {"input_ids": ids, "labels": torch.tensor([0, 1, 2, 1])}, None


def test_a_classifier_trains_as_one_process_does() -> None:
    assert_equal(classifier(), PLAN)


def test_labels_are_read_by_the_last_stage_only_and_others_would_be_seen() -> None:
    def fault(program) -> bool:
        first, last = (stage.phases["F"].named(BATCH) for stage in program.stages)
        assert "labels" not in first
        flip = torch.ops.aten.flip.default
        return tamper(program, 1, "F", lambda node: node is last["labels"], flip, [0])

    assert finding(classifier(), PLAN, fault) == "loss"
