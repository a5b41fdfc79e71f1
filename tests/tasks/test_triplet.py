"""Is the triplet loss its formula, also where batches are odd?"""

import math

import pytest
import torch
from torch import Tensor

from fullstride.tasks.classify import Classify
from fullstride.tasks.losses import batch_hard_triplet, weighted_triplet

ODD = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3])  # 3 has no positive


def embeddings(scale: float = 1.0, count: int = len(ODD)) -> Tensor:
    return scale * torch.randn(
        count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def by_loops(x: Tensor, labels: list[int]) -> float:
    """The formula, one number after the other."""
    rows, losses = x.tolist(), []
    for a, anchor in enumerate(rows):
        d = [math.dist(anchor, other) for other in rows]
        positives = [d[i] for i in range(len(d)) if labels[i] == labels[a] and i != a]
        negatives = [d[i] for i in range(len(d)) if labels[i] != labels[a]]
        if positives and negatives:
            far = sum(math.exp(p) * p for p in positives) / sum(math.exp(p) for p in positives)
            near = sum(math.exp(-n) * n for n in negatives) / sum(math.exp(-n) for n in negatives)
            losses.append(math.log(1 + math.exp(far - near)))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize(
    "labels", [ODD, ODD.flip(0), torch.arange(10) % 5, torch.arange(10) % 2], ids=str
)
def test_the_loss_is_its_formula(labels):
    x = embeddings()
    assert weighted_triplet(x, labels).item() == pytest.approx(
        by_loops(x, labels.tolist()), abs=1e-12
    )


def test_the_gradient_is_of_the_whole_formula_weights_included():
    assert torch.autograd.gradcheck(
        lambda x: weighted_triplet(x, ODD), embeddings().requires_grad_()
    )


def test_a_step_down_the_gradient_draws_classes_together_and_apart_from_others():
    x = embeddings().requires_grad_()

    def gap() -> float:
        d = torch.cdist(x, x)
        same = ODD[:, None] == ODD
        return (d[~same].mean() - d[same].mean()).item()

    before = gap()
    weighted_triplet(x, ODD).backward()
    assert x.grad is not None
    with torch.no_grad():
        x -= x.grad
    assert gap() > before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("triplet", [weighted_triplet, batch_hard_triplet])
def test_where_all_embeddings_coincide_the_loss_is_ln_2_and_gradients_are_finite(dtype, triplet):
    x = torch.full(
        (40, 3), 7.3, dtype=dtype, requires_grad=True
    )  # PyTorch's own choice changes above 25 rows
    loss = triplet(x, torch.arange(40) % 4)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("labels", [[5, 5, 5, 5], [0, 1, 2, 3], [8]], ids=str)
@pytest.mark.parametrize("triplet", [weighted_triplet, batch_hard_triplet])
def test_without_an_image_that_has_both_kinds_the_loss_and_its_gradient_are_0(labels, triplet):
    x = embeddings(count=len(labels)).requires_grad_()
    loss = triplet(x, torch.tensor(labels))
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert x.grad.tolist() == torch.zeros_like(x).tolist()


@pytest.mark.parametrize("scale", [1e4, 1e6])
def test_far_apart_only_the_hardest_positive_and_negative_count(scale):
    x = embeddings(scale)
    d, same = torch.cdist(x, x), ODD[:, None] == ODD
    hardest = torch.where(same, d, 0).amax(1) - torch.where(same, torch.inf, d).amin(1)
    expected = torch.nn.functional.softplus(hardest[:-1]).mean()
    assert weighted_triplet(x, ODD).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_lifted_so_that_large_embeddings_stay_finite(dtype):
    x = embeddings(1000).to(dtype)
    loss = weighted_triplet(x, ODD)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(weighted_triplet(x.double(), ODD).item(), rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(weighted_triplet(x, ODD), loss)


def test_embeddings_far_from_the_origin_lose_no_digits_to_each_other():
    near = embeddings(0.1).float()
    moved = near + 64
    assert weighted_triplet(moved, ODD).item() == pytest.approx(
        weighted_triplet((moved - 64).double(), ODD).item(), rel=1e-6
    )


@pytest.mark.parametrize(
    "labels", [ODD, ODD.flip(0), torch.arange(10) % 5, torch.arange(10) % 2], ids=str
)
def test_the_batch_hard_form_is_that_of_pytorch_metric_learning(labels):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.miners import BatchHardMiner
    from pytorch_metric_learning.reducers import MeanReducer

    distance = LpDistance(normalize_embeddings=False)
    theirs = losses.TripletMarginLoss(
        margin=0, smooth_loss=True, distance=distance, reducer=MeanReducer()
    )
    gradients, values = [], []
    for loss in (
        batch_hard_triplet,
        lambda x, y: theirs(x, y, BatchHardMiner(distance=distance)(x, y)),
    ):
        x = embeddings().requires_grad_()
        value = loss(x, labels)
        value.backward()
        values.append(value.item())
        gradients.append(x.grad)
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e4, 1e6])
def test_for_large_embeddings_both_forms_are_the_same(scale):
    x = embeddings(scale)
    assert batch_hard_triplet(x, ODD).item() == pytest.approx(weighted_triplet(x, ODD).item())


def test_a_recipe_chooses_the_form():
    x, logits = embeddings(), torch.zeros(len(ODD), 4, dtype=torch.float64)
    plain = Classify().loss(logits, ODD)
    for form, loss in (("weighted", weighted_triplet), ("batch_hard", batch_hard_triplet)):
        task = Classify(triplet=0.5, triplet_form=form)
        assert torch.equal(task.loss((logits, x), ODD), plain + 0.5 * loss(x, ODD))
