"""Every method's own properties, and all of them behind one interface."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Annotated, Literal

import pytest
import torch
from torch import nn

from taskferry import Calibration, Prototypes, TaskferryError, TaskVector, fit
from taskferry.layers import family_of
from taskferry.layers.family import HEAD
from taskferry.methods import CannotMove, Job, Moved, Needs, find, method, methods, registry, run
from taskferry.methods.gradfix import descent_signs, singles
from taskferry.methods.transfusion import Spaces, match_permutations
from tests.helpers.architectures import BIGCODE, PACKED
from tests.helpers.tiny import TINY, double, job, rebuilt, relative, tuned
from tests.properties.equivariant import Embedding, Equivariant, Widths, calibration, distance, loss, random_task_vector

METHODS = ["bico", "distil", "gradfix", "naive", "natural", "theseus", "transfusion"]


def test_all_methods_are_there() -> None:
    assert list(methods()) == METHODS
    assert all(found.summary for found in methods().values())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("distil", "natural")])
def test_every_method_gives_a_task_vector_for_the_target(name: str) -> None:
    given = job("vit")
    before = {n: p.detach().clone() for n, p in given.target.named_parameters()}
    moved = run(name, given).tau
    assert moved.coverage is not None
    assert [row.parameter for row in moved.coverage] == list(before)
    assert set(moved.coverage.moved()) == set(moved.deltas)
    assert len(moved) > 10
    for n, delta in moved.deltas.items():
        assert tuple(delta.shape) == tuple(before[n].shape)
        assert bool(torch.isfinite(delta).all())
    assert all(torch.equal(p, before[n]) for n, p in given.target.named_parameters())  # nothing is left changed
    assert all(p.grad is None for p in given.target.parameters())


# bico and its ablations


def test_bico_is_fit_and_apply() -> None:
    given = job("vit", (16, 2), (24, 3))
    expected = fit(given.source, given.target, given.calibration, given.pair.objective).apply(given.tau)
    moved = run("bico", given)
    assert all(torch.equal(moved.tau.deltas[n], d) for n, d in expected.deltas.items())


def test_gradient_only_recovers_a_planted_rotation_too() -> None:
    """Gradients with respect to inputs rotate with the basis as activations do."""
    torch.manual_seed(7)
    A = Equivariant(Widths()).double()
    embedding = Embedding(Widths(), Widths(), 3)
    B, tau = embedding.model(A, Widths()), random_task_vector(A)
    truth = embedding.task_vector(tau)
    moved = run("bico", Job.of(A, B, tau, calibration(), loss), inputs="gradients").tau
    # A layer with fewer outputs than inputs sends back gradients of lower rank: there it sees a part only.
    for name in (n for n in truth.deltas if n.split(".")[-2] in ("o", "up", "down")):
        assert relative(moved.deltas[name], truth.deltas[name]) < 1e-6, name


# theseus


def test_theseus_recovers_a_planted_rotation_without_a_backward_pass() -> None:
    torch.manual_seed(7)
    A = Equivariant(Widths()).double()
    embedding = Embedding(Widths(), Widths(18, 13, 11, 20), 3)
    B, tau = embedding.model(A, Widths(18, 13, 11, 20)), random_task_vector(A)

    def no_backward(model: nn.Module, batch) -> torch.Tensor:
        return loss(model, batch).detach()

    moved = run("theseus", Job.of(A, B, tau, calibration(), no_backward)).tau
    truth = embedding.task_vector(tau)
    # A layer with fewer inputs than outputs makes activations of lower rank: there it sees a part only.
    for name in (n for n in truth.deltas if n.split(".")[-2] != "o"):
        assert relative(moved.deltas[name], truth.deltas[name]) < 1e-6, name


def test_theseus_and_bico_differ() -> None:
    given = job("vit", (16, 2), (24, 2))
    theseus, bico = run("theseus", given).tau, run("bico", given).tau
    assert set(theseus.deltas) - set(bico.deltas) == {"pooler.dense.weight", "pooler.dense.bias"}  # no gradient there
    assert all(relative(theseus.deltas[n], d) > 0.1 for n, d in bico.deltas.items() if d.ndim == 2)


# naive


def test_naive_adds_pads_and_crops() -> None:
    same = job("llama")
    moved = run("naive", same).tau
    assert all(torch.equal(moved.deltas[n], same.tau.deltas[n]) for n in moved.deltas if "lm_head" not in n)
    assert {n for n in same.tau.deltas if n not in moved.deltas} == set()
    wider = job("llama", (16, 2), (24, 2))
    padded = run("naive", wider).tau.deltas["model.layers.0.mlp.up_proj.weight"]
    tau = wider.tau.deltas["model.layers.0.mlp.up_proj.weight"]
    assert padded.shape == (48, 24)
    assert torch.equal(padded[:32, :16], tau)
    assert not bool(padded[32:].any())
    assert not bool(padded[:, 16:].any())
    narrower = job("llama", (24, 2), (16, 2))
    cropped = run("naive", narrower).tau.deltas["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(cropped, narrower.tau.deltas["model.layers.0.mlp.up_proj.weight"][:32, :16])


# gradfix


@pytest.mark.parametrize("vote", ["mean", "majority"])
def test_the_mask_keeps_exactly_the_agreeing_signs(vote: Literal["mean", "majority"]) -> None:
    given = job("vit")
    moved = run("gradfix", given, vote=vote).tau
    value = given.pair.objectives[1].bind(given.target, given.calibration.side(1))
    model = given.target.requires_grad_(True)
    parameters = dict(model.named_parameters())
    votes = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in given.calibration.side(1):
        for one in singles(batch):
            gradients = torch.autograd.grad(value(one), list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    votes[name] -= gradient if vote == "mean" else gradient.sign()
    for name, delta in moved.deltas.items():
        tau = given.tau.deltas[name]
        agrees = tau.sign() == votes[name].sign()
        kept = delta != 0
        certain = votes[name].abs() > 1e-12  # a sum of exactly nothing may round to either sign
        assert torch.equal(kept[certain], (agrees & (tau != 0))[certain]), name
        assert torch.equal(delta[kept], tau[kept])
    with pytest.raises(CannotMove, match=r"equal shape.*16\) in the source, \(1, 1, 24"):
        run("gradfix", job("vit", (16, 2), (24, 2)))
    with pytest.raises(CannotMove, match="no such parameter in the source"):
        run("gradfix", job("vit", (16, 2), (16, 3)))  # the first blocks would fit, but the models differ


def test_the_masked_change_is_a_descent_direction() -> None:
    given = job("vit")
    moved = run("gradfix", given).tau
    value = given.pair.objectives[1].bind(given.target, given.calibration.side(1))
    signs = descent_signs(given.target, value, given.calibration.side(1), list(moved.deltas), "mean")
    assert all(float((moved.deltas[n].sign() * signs[n]).min()) >= 0 for n in moved.deltas)


# transfusion


def shuffled(model: nn.Module, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor], Spaces]:
    """The same function with every space permuted at random, heads as wholes and inside."""
    g = torch.Generator().manual_seed(seed)
    spaces = Spaces.of(model)
    heads: dict[str, list[int]] = {}
    order = {}
    for space, size in spaces.sizes.items():
        if space not in spaces.heads:
            order[space] = torch.randperm(size, generator=g)
            continue
        count, block = spaces.heads[space]
        heads.setdefault(block, torch.randperm(count, generator=g).tolist())
        width = size // count
        order[space] = torch.cat([h * width + torch.randperm(width, generator=g) for h in heads[block]])
    copied = copy.deepcopy(model)
    permuted = spaces.permute({n: p.detach() for n, p in model.named_parameters()}, order)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(permuted[name])
    return copied, order, spaces


@pytest.mark.parametrize("name", ["vit", "openclip", "openclip-own-attention", "timm", "bert", "clip", "bigcode"])
def test_a_permuted_model_computes_the_same_function(name: str) -> None:
    tiny = BIGCODE if name == "bigcode" else TINY[name]
    model = tiny.model(16, 2, 0)
    other, order, _ = shuffled(model)
    assert any(not torch.equal(o, torch.arange(len(o))) for o in order.values())
    batch = tiny.batch(0, 4)
    family = family_of(model)
    with torch.no_grad():
        one, two = family.features(model, batch), family.features(other, batch)
    if name in ("vit", "timm", "bert", "bigcode"):  # features are coordinates of the residual stream
        residual = next(o for space, o in order.items() if space.endswith("residual"))
        one = one[:, residual]
    assert torch.allclose(one, two, atol=1e-4)


@pytest.mark.parametrize("name", ["vit", "openclip"])
def test_a_planted_permutation_is_recovered(name: str) -> None:
    tiny = TINY[name]
    A = tiny.model(16, 3, 0)
    B, order, spaces = shuffled(A, 3)
    found = match_permutations(spaces, dict(A.named_parameters()), dict(B.named_parameters()), 50)
    assert all(torch.equal(found[space], order[space]) for space in order)
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    moved = run("transfusion", Job.of(A, B, tau, tiny.calibration(), tiny.objective)).tau
    expected = spaces.permute(dict(tau.deltas), order)
    assert all(torch.equal(moved.deltas[n], expected[n]) for n in expected)


def test_transfusion_says_what_it_cannot_do() -> None:
    with pytest.raises(CannotMove, match=r"equal shape.*16\) in the source, \(1, 1, 24"):
        run("transfusion", job("vit", (16, 2), (24, 2)))
    with pytest.raises(CannotMove, match="rotary"):
        run("transfusion", job("llama"))


# heads that never move


def with_heads(name: str, source: int, target: int, depths: tuple[int, int] = (2, 2)) -> Job:
    """A job between models of equal width whose heads know so many classes; 0 is no head at all."""
    given = job(name, (16, depths[0]), (16, depths[1]))
    torch.manual_seed(0)
    for model, count in ((given.source, source), (given.target, target)):
        head = nn.Linear(16, count).double() if count else nn.Identity()
        setattr(model, "head" if name == "timm" else "classifier", head)
    tau = TaskVector.between(dict(given.source.named_parameters()), tuned(given.source))
    return rebuilt(given, tau=tau)


@pytest.mark.parametrize("name", ["gradfix", "transfusion", "naive"])
@pytest.mark.parametrize("classes", [(3, 3), (5, 3), (5, 0), (0, 3)])
def test_a_head_that_does_not_move_may_differ(name: str, classes: tuple[int, int]) -> None:
    given = with_heads("timm", *classes)
    moved = run(name, given).tau
    body = {n for n in given.tau.deltas if not n.startswith("head.")}
    assert {n for n in moved.deltas if not n.startswith("head.")} == body
    moved.add_to(copy.deepcopy(given.target))
    assert moved.coverage is not None
    assert [row.parameter for row in moved.coverage] == [n for n, _ in given.target.named_parameters()]
    if classes[0] != classes[1]:
        assert not any(n.startswith("head.") for n in moved.deltas)
    if name != "naive" and classes == (5, 3):
        assert moved.coverage["head.weight"].reason == HEAD
        assert moved.coverage.unused == {"head.weight": HEAD, "head.bias": HEAD}


def test_a_classifier_that_does_not_move_may_differ() -> None:
    given = with_heads("bert-classifier", 5, 3)
    moved = run("gradfix", given).tau
    assert set(given.tau.deltas) - set(moved.deltas) == {"classifier.weight", "classifier.bias"}


def test_a_head_that_differs_changes_nothing_else() -> None:
    """The mask of a layer is that of the target alone, and permutations are found without the heads."""
    for name in ("gradfix", "transfusion"):
        same, other = (run(name, with_heads("timm", classes, 3)).tau for classes in (0, 5))
        assert all(torch.equal(other.deltas[n], d) for n, d in same.deltas.items())


@pytest.mark.parametrize("name", ["gradfix", "transfusion"])
def test_a_body_that_differs_is_refused_whatever_the_change(name: str) -> None:
    deeper = with_heads("timm", 5, 3, (2, 3))
    wider = job("timm", (16, 2), (24, 2))
    for given in (deeper, rebuilt(deeper, tau=deeper.tau.take(["blocks.0.mlp.fc1.weight"]))):
        with pytest.raises(
            CannotMove, match=r"blocks\.2\.\S+ is no such parameter in the source, \(\d+.*\) in the target"
        ):
            run(name, given)
    for given in (wider, rebuilt(wider, tau=wider.tau.take(["blocks.0.mlp.fc1.weight"]))):
        with pytest.raises(CannotMove, match=r"needs models of equal shape: \S+ is \(\d+.*\) in the source, \(\d+"):
            run(name, given)
    table = job("timm")
    table.target.pos_embed = nn.Parameter(table.target.pos_embed[:, :-1])
    with pytest.raises(CannotMove, match=r"pos_embed is \(1, 17, 16\) in the source, \(1, 16, 16\) in the target"):
        run(name, table)  # the task vector changes it


# modes


class Noisy(nn.Module):
    """Dropout and running means: another model in train mode, and another after every pass in it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d if i else 10, d) for i in range(2))
        self.mean, self.dropout = nn.BatchNorm1d(d), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.mean(1) if x.ndim == 3 else x))
        return self.dropout(self.mean(x))


def test_the_mode_of_the_target_neither_counts_nor_changes() -> None:
    """Nothing is drawn by chance, no running mean moves, and every module is left in the mode in which it came."""
    torch.manual_seed(3)
    A, B = Noisy(8).double(), Noisy(8).double()
    batches = [double(a) for a, _ in TINY["plain"].calibration(24, 6)]
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    given = Job.of(A, B, tau, Calibration((b, b) for b in batches), Prototypes())
    expected = run("gradfix", rebuilt(given, source=A.eval(), target=B.eval())).tau
    A.train()
    B.train()
    B.layers[0].eval()  # one that its owner keeps still
    modes, buffers = [m.training for m in B.modules()], {n: b.clone() for n, b in B.named_buffers()}
    found = run("gradfix", given).tau
    assert distance(found, expected) < 1e-12
    assert [m.training for m in B.modules()] == modes
    assert all(torch.equal(b, buffers[n]) for n, b in B.named_buffers())


# the interface


def test_settings_are_checked_all_together() -> None:
    with pytest.raises(TaskferryError, match=r"unknown setting 'sides'.*tolerance"):
        run("bico", job("vit"), sides=2, tolerance="small")
    with pytest.raises(TaskferryError, match="no method 'magic': one of bico"):
        find("magic")


def test_a_method_of_one_s_own_is_one_function() -> None:
    @method(needs=Needs(samples=False, whole=True))
    def half_naive(given: Job, *, factor: Annotated[float, "how much of it"] = 0.5) -> Moved:
        """Half of the naive change."""
        return Moved(factor * run("naive", given).tau)

    given = job("vit")
    try:
        moved = run("half-naive", given, factor=0.25)
        known = find("half-naive")
        assert known.settings["factor"] == (float, 0.5, "how much of it")
        assert known.summary == "Half of the naive change."
        assert distance(moved.tau, 0.25 * run("naive", given).tau) < 1e-9
        assert moved.provenance["method"] == "half-naive"
        assert moved.provenance["settings"] == {"factor": 0.25}
        assert moved.provenance["calibration"]["sha256"] == given.calibration.identity()
        with pytest.raises(TaskferryError, match="half-naive needs both models whole in one process"):
            known.refuse("blockwise")
        with pytest.raises(TaskferryError, match="half-naive leaves no maps to save"):
            known.refuse("whole", save=True)
    finally:
        registry._METHODS.pop("half-naive")


@pytest.mark.parametrize("name", ["bico", "theseus"])
def test_methods_with_maps_leave_them_and_run_on_every_engine(name: str) -> None:
    given = job("vit", (16, 2), (24, 3))
    for engine in ("whole", "blockwise"):
        find(name).refuse(engine, save=True)
    moved = run(name, given)
    assert moved.alignment is not None
    assert moved.alignment.provenance == moved.provenance
    assert moved.provenance["method"] == name
    assert moved.provenance["settings"]["map_rank"] == "range"
    assert [row["target"] for row in moved.sites] == [pair.target.name for pair in moved.alignment.pairs]
    assert (distance(moved.alignment.apply(given.tau), moved.tau)) < 1e-9


@pytest.mark.parametrize("name", ["bert-classifier", "t5", "whisper"])
def test_transfusion_refuses_what_it_cannot_keep_true(name: str) -> None:
    with pytest.raises(CannotMove, match="transfusion does not know"):
        Spaces.of(TINY[name].model(16, 2, 0))


@pytest.mark.parametrize("name", ["neox", "gptj", "codegen", "bloom", "mpt"])
def test_transfusion_refuses_heads_that_cannot_change_places(name: str) -> None:
    with pytest.raises(CannotMove, match=r"rotary positions|ALiBi"):
        Spaces.of(PACKED[name].model(16, 2, 0))


def test_theseus_needs_no_labels() -> None:
    tiny = TINY["bert"]
    A, B = tiny.model(16, 2, 0), tiny.model(24, 2, 1)
    plain = Calibration((replace(a, labels=None), replace(b, labels=None)) for a, b in tiny.calibration())
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    assert len(run("theseus", Job.of(A, B, tau, plain)).tau) > 10
