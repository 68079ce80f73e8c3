"""The pages of the error codes of capture: models that one fixed program can't stand for."""

from collections.abc import Mapping

from autoshard.dsl.specs import Page

CAPTURE_PAGES: Mapping[str, Page] = {
    "AS700": Page(
        "the model fails while it is captured",
        "Capture runs the model once on tensors that have shapes but no numbers. An error there is "
        "either the model's own (run it once eagerly to see) or comes from code that reads the "
        "numbers of a tensor: numpy(), tolist(), a kernel called past torch's dispatcher.",
    ),
    "AS701": Page(
        "what the model does depends on the values of a tensor",
        "One fixed program serves every batch, and all ranks must run the same collectives: a "
        "branch on a value would let them disagree and hang.",
        "if x.sum() > 0: x = self.fc(x)",
        "x = torch.where(x.sum() > 0, self.fc(x), x)",
    ),
    "AS702": Page(
        "gradients would be lost",
        "Capture sees the forward only. A custom autograd.Function whose backward is not the "
        "derivative of its forward, activation checkpointing, torch.inference_mode() and trainable "
        "tensors kept outside the registered parameters would silently change gradients.",
        "StraightThrough.apply(x)",
        "x + (x.round() - x).detach()",
    ),
    "AS703": Page(
        "the model is not plain",
        "Give the model as it was before DistributedDataParallel, FSDP, torch.compile, "
        "quantization or autocast, on one device or all on meta: the plan says what they say. "
        "A trained parameter of complex numbers is kept as its two parts (torch.view_as_real); "
        "complex buffers and values are fine.",
    ),
    "AS704": Page(
        "a hook",
        "Programs are flat graphs without modules, so hooks on modules and parameters can't fire. "
        "Act on `.grad` after `forward_backward`, or write what the hook does into forward.",
    ),
    "AS705": Page(
        "an operator that can't be captured",
        "A kernel of a third party needs a fake implementation (register_fake) and, where "
        "gradients flow through it, a registered autograd formula.",
    ),
    "AS706": Page(
        "the model writes to a buffer, a parameter or its input",
        "A program has no state to write back to. BatchNorm in train mode is of this kind, and its "
        "statistics would be those of one micro-batch of one rank, as would the counts of an "
        "embedding with `scale_grad_by_freq`. A `sparse` gradient has no place to be kept.",
        "nn.BatchNorm1d(64)",
        "nn.GroupNorm(1, 64)",
    ),
    "AS707": Page(
        "a tensor is kept from one forward to the next",
        "An attribute that holds a tensor of the last forward would keep its first value for ever. "
        "A cache built from constants on first use is fine.",
    ),
    "AS708": Page(
        "no loss, or not one number",
        "Training needs a loss of shape []: from `loss=`, from `output.loss` or `output['loss']`, "
        "or as the model's output.",
    ),
    "AS709": Page(
        "a random operator",
        "Dropout draws by (seed, step, site, global element), so that it is the same on every "
        "mesh. Other random operators would draw other numbers on each rank.",
        "x + torch.randn_like(x)",
        "x + noise  # drawn outside and given with the batch",
    ),
    "AS710": Page(
        "the batch doesn't fit forward",
        "A dict gives forward the keys that it names, a tuple goes by position; every tensor of "
        "the batch becomes an input of the program.",
    ),
    "AS711": Page(
        "the captured program is not the eager model",
        "After capture, loss and every gradient are compared once with the eager model where it "
        "fits in memory, dropout off. A difference beyond rounding stops the work: something in "
        "forward depends on more than its inputs.",
    ),
    "AS712": Page(
        "the loss can't be made global",
        "The loss of a step is that of the whole global batch, summed over micro-batches and "
        "data-parallel ranks. So it must be a sum or mean of terms that look at one sample each; "
        "one that compares samples needs dp = 1 and one micro-batch.",
    ),
}
