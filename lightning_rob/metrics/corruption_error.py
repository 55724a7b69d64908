"""The mean error under common corruptions, alone and relative to a reference network."""

from collections.abc import Mapping, Sequence

# Of AlexNet on ImageNet-C, means over five severities, from the authors' repository
# (github.com/hendrycks/robustness).
ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}


def corruption_error(
    errors: Mapping[str, Sequence[float]], reference: Mapping[str, float] | None = None
) -> float:
    """Compute the mean corruption error, mCE with a reference (Hendrycks and Dietterich 2019).

    Args:
        errors: corruption -> error at each severity, in [0, 1].
        reference: corruption -> a reference network's mean error over the severities 1 to 5, such
            as `ALEXNET_ERRORS` for ImageNet. Each corruption's errors are divided by it.

    Returns:
        The mean over corruptions and severities: a share of all images or, with a reference, of
        the reference's error; 1 is as good as the reference.
    """
    if reference is not None:
        check_reference(list(errors), {len(values) for values in errors.values()}, reference)
    # Divided by the reference, each corruption counts as much as another, however hard it is.
    scales = reference or dict.fromkeys(errors, 1.0)
    means = {name: sum(values) / len(values) for name, values in errors.items()}
    return sum(means[name] / scales[name] for name in errors) / len(errors)


def check_reference(
    names: Sequence[str], severities: set[int], reference: Mapping[str, float]
) -> None:
    """Raise ValueError unless mCE by this reference is defined for these corruptions."""
    if set(names) != set(reference):
        raise ValueError(
            f"the reference has errors of {', '.join(sorted(reference))}, not of "
            f"{', '.join(sorted(names))}: mCE is the mean over the same corruptions"
        )
    if severities != {5}:
        raise ValueError(f"mCE needs the severities 1 to 5, got {sorted(severities)} of them")
