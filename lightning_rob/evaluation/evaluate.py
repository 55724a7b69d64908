"""Score a defense under attacks, image by image, without Lightning."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler
from tqdm import tqdm

from lightning_rob.attacks import Attack
from lightning_rob.attacks.base import check_images
from lightning_rob.defenses import Defense, Single
from lightning_rob.defenses.network import Preprocessed
from lightning_rob.evaluation.evaluator import (
    TRIED,
    AttackedBatch,
    EvaluationSettings,
    Evaluator,
    check_attacks,
    check_indices,
    device_of,
    evaluation_precision,
)
from lightning_rob.evaluation.findings import warn_of
from lightning_rob.evaluation.groups import (
    GROUP_SIZE,
    Batch,
    Unpack,
    canonical_groups,
    choose,
    counted,
    group_loader,
    regrouped,
    served_positions,
    serves_once,
    with_index,
)
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.evaluation.records import threat_model_card, versions
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.evaluation.store import PerImageResults
from lightning_rob.evaluation.suites import attacks_by_name
from lightning_rob.evaluation.worst import draws_noise
from lightning_rob.runtime.errors import at_least, is_of_shape
from lightning_rob.runtime.identity import cache_key, fingerprint
from lightning_rob.runtime.processes import gathered
from lightning_rob.tables import CLEAN
from lightning_rob.threat import PROJECTED, Length, Norm, Threat, norm_order


def evaluate(
    model: nn.Module,
    attacks: Mapping[str, Attack] | str,
    batches: Iterable[Any],
    *,
    eps: Length | None = None,
    norm: Norm = "linf",
    seed: int = 0,
    repeats: int = 1,
    inferences: int = 1,
    private_draws: int = 1,
    max_images: int | None = None,
    group_size: int = GROUP_SIZE,
    protocol: RoundProtocol | None = None,
    known_noise: bool = False,
    unpack: Unpack | None = None,
    preprocess: Callable[[Tensor], Tensor] | None = None,
    resume: Path | str | None = None,
    checks: bool = True,
    power: int = 0,
    progress: bool = True,
) -> EvaluationResult:
    """Score a defense on clean images and under each attack.

    Images of a `DataLoader` over a data set with positions are attacked in canonical groups, each
    image once, so that batch size, order and repetitions change nothing. Of any other iterable
    consecutive images are attacked together. Images are moved to the defense's device.

    Args:
        model: a `Defense`; a module with a `defense`, such as a `RobustModule`; or a network
            [B, C, H, W] -> [B, K], which is wrapped in `Single`.
        attacks: name -> attack; or one word for attacks within `eps`: "pgd" of 20 steps,
            "autoattack", "auto" (`Auto`, which adapts itself), "suite", all within that ball that
            the audit runs on such a defense, or one of these, such as "climb" on an ensemble.
        batches: (x, y) or (x, y, index): images in [0, 1], labels, and the images' indices, by
            which all noise is keyed; without them the position is the index.
        eps: radius of attacks given by one word, in pixel units; "8/255" is accepted.
        norm: their norm.
        seed: seed of all noise, and of the choice of `max_images`.
        repeats: attacks of each image with fresh noise; the scores are averaged.
        inferences: predictions of each image, clean or perturbed once.
        private_draws: defenders, each with private randomness of its own, that adapt to the same
            perturbed batch.
        max_images: attack this many images, a random choice by the seed; None attacks all.
        group_size: images that are attacked together; other sizes may round otherwise.
        protocol: the rounds in which a defense that adapts is attacked; None is `RoundProtocol()`.
        known_noise: attack a defense that predicts at random once more, by an attacker who knows
            its draws; see `EvaluationResult.known_noise`.
        unpack: function of a batch that returns one of the above; None takes batches as they are.
        preprocess: what is applied to images before a plain network, such as a normalization;
            attacks go through its gradient.
        resume: a folder; an evaluation that was killed continues from the images it has there.
        checks: check the defense on the first images, which costs a few passes.
        power: number of images on which each attack is tested: does it find adversarial images that
            exist by construction? See `lightning_rob.audit.power`; it costs these attacks again.

    Returns:
        The scores, image by image, with accuracies, intervals and comparisons, and `findings`: what
        makes an accuracy suspicious. Each that is severe or a warning is a `FindingWarning` too.
    """
    check_loader(batches)
    defense = as_defense(model, preprocess)
    if not isinstance(attacks, (str, Mapping)):
        turned = isinstance(batches, (str, Mapping, Attack))
        advice = 'give {"pgd": PGD(…)}, or one word, such as "pgd"'
        advice = "the order is evaluate(net, attacks, batches)" if turned else advice
        got = type(attacks).__name__
        raise TypeError(f"attacks must be a word or a mapping of attacks, got a {got}: {advice}")
    if isinstance(attacks, str) != (eps is not None):
        raise ValueError(
            f"the word {attacks!r} needs a radius, such as eps=8/255"
            if eps is None
            else f"eps={eps} is for one word: each attack of a mapping has its own threat"
        )
    if isinstance(attacks, str) and norm_order(norm) not in PROJECTED:
        raise ValueError(f"attacks given by one word are for linf, l2 and l1, got norm {norm!r}")
    at_least(0, power=power)
    settings = EvaluationSettings(
        seed, repeats, inferences, private_draws, max_images, group_size, protocol, known_noise
    )
    rounds = settings.protocol_for(defense)
    groups = indexed_groups(batches, settings, rounds, unpack)
    if isinstance(attacks, str):
        first = [*islice(groups, 1)]
        groups, random = chain(first, groups), any(_is_random(defense, *one) for one in first)
        attacks = attacks_by_name(attacks, defense, Threat(norm, eps or 0.0), random)
    check_attacks(attacks)
    details = {**settings.asdict(), "precision": evaluation_precision()}
    folder, device, count = None, device_of(defense), 0
    if resume is not None:
        size = None if rounds is None else rounds.size(batches)
        if size is not None and defense.stateful:
            raise ValueError("resume is not for a defense that keeps its state: run it in one go")
        # All that the scores depend on, beside the images.
        folder = Path(resume) / cache_key(
            weights=fingerprint(defense),
            attack_code=dict(attacks),
            attacks={name: threat_model_card(attack) for name, attack in attacks.items()},
            round=size,
            versions=versions(),
            checks=checks,  # they decide where gradients are taken
            **details,
        )
    store = PerImageResults((CLEAN, *attacks), settings.columns, device, folder)
    images = len(batches.dataset) if serves_once(batches) else None  # type: ignore[attr-defined]
    with tqdm(
        desc="Attacking",
        unit="image",
        total=images if max_images is None or images is None else min(images, max_images),
        disable=not progress or None,
    ) as bar:

        def attacked(batch: AttackedBatch) -> None:
            bar.set_postfix_str(batch.name, refresh=False)
            bar.update(len(batch.index) / len(attacks))

        evaluator = Evaluator(defense, attacks, settings, store, attacked, details, checks, power)
        with torch.autocast(device.type, enabled=False), torch.inference_mode(False):
            for batch in groups:
                x, y, index = (part.to(device) for part in batch)
                with _naming_shape(x):
                    evaluator.score(x.float(), y, index)
                count += len(x)
    if not count:
        raise ValueError("there are no images to evaluate: the batches are empty")
    evaluator.powers /= len(gathered(None))  # each process has all images
    found = evaluator.result()
    check_indices(found.index, count)
    # A log that stays would be taken for that of an interrupted evaluation.
    store.log.delete()
    warn_of(found.findings)
    return found


def _is_random(defense: Defense, x: Tensor, y: Tensor, index: Tensor) -> bool:
    """Return whether a plain network predicts the first images at random."""
    check_images(x, (0.0, 1.0))
    x = x[:TRIED].to(device_of(defense)).float()
    with _naming_shape(x):
        return draws_noise(defense, x, index[:TRIED])


@contextmanager
def _naming_shape(x: Tensor) -> Iterator[None]:
    """Name the shape of the images where a network does not take it, of which torch says little."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_shape(error):
            raise
        shape = ", ".join(["B", *map(str, x.shape[1:])])
        # Of a network on vectors torch speaks of matrices.
        right = x.dim() == 4 or "multiplied" in str(error)
        advice = "" if right else ", images must be [B, C, H, W]"
        text = f"the network does not take images of shape [{shape}]{advice}: {error}"
        raise ValueError(text) from error


def as_defense(model: nn.Module, preprocess: Callable[[Tensor], Tensor] | None = None) -> Defense:
    """Return a model as a defense: itself, its `defense`, or the network in `Single`."""
    own = model if isinstance(model, Defense) else getattr(model, "defense", None)
    if isinstance(own, Defense):
        if preprocess is None:
            return own
        if not isinstance(own, Single):
            raise ValueError(
                f"preprocess is for plain networks, got {type(own).__name__}: put the "
                "preprocessing into its networks"
            )
        return Single(Preprocessed(preprocess, own.classifiers[0]), own.rule, own.rejects)
    if not isinstance(model, nn.Module):
        advice = ": give Ensemble([...])" if isinstance(model, list) else ""
        advice = f": give {model.__name__}()" if isinstance(model, type) else advice
        kind = type(model).__name__
        raise TypeError(f"model must be an nn.Module or a Defense, got {kind}{advice}")
    # Its buffers, such as a mean, have to be where the network is.
    if isinstance(preprocess, nn.Module):
        preprocess.to(device_of(model))
    return Single(model if preprocess is None else Preprocessed(preprocess, model))


def check_loader(batches: Any) -> None:
    """Raise TypeError for a data set or a data module in place of a loader."""
    name = type(batches).__name__
    if isinstance(batches, Dataset):
        raise TypeError(f"batches is a data set: give DataLoader({name}(…), batch_size=128)")
    if hasattr(batches, "test_dataloader"):
        advice = "data.setup('test'), then data.test_dataloader()"
        raise TypeError(f"batches is the data module {name}: give a loader of it: {advice}")


def indexed_groups(
    batches: Any,
    settings: EvaluationSettings,
    protocol: RoundProtocol | None,
    unpack: Unpack | None,
) -> Iterator[Batch]:
    """Yield canonical groups or rounds of images, with labels and indices."""
    check_loader(batches)
    size = settings.group_size if protocol is None else protocol.size(batches)
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError("evaluate gives each process all images: leave out DistributedSampler")
    served = served_positions(batches)
    if served is None:
        if settings.max_images is not None:
            raise ValueError("max_images needs a DataLoader that knows its images: leave it out")
        if protocol is not None and protocol.order != "natural":
            raise ValueError(f"order {protocol.order!r} needs a DataLoader that knows its images")
        yield from regrouped(counted(batches, unpack), size)
        return
    # Images are fetched by position: the loader's order and batch size change no score.
    chosen = choose(len(served), settings.max_images, settings.seed)
    positions = torch.tensor(served, dtype=torch.int64)[chosen]
    if protocol is not None:
        for places, batch in protocol.rounds(batches, positions, unpack=unpack):
            yield with_index(batch, places, unpack)
        return
    groups = canonical_groups(positions, size)
    for group, batch in zip(groups, group_loader(batches, groups), strict=True):
        yield with_index(batch, group, unpack)
