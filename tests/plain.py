"""Attacks written down straight from their papers, for a batch, without thought for time."""

import torch


def arc(members, weights, x, y, threat, steps, step_size, neighbours=None, start=None):
    """ARC paper, Algorithm 2: one backward per class, the ensemble evaluated wherever L appears."""

    def per_image(values):
        return values.view(-1, *[1] * (x.dim() - 1))

    def expected(images):
        with torch.no_grad():
            right = torch.stack([member(images).argmax(1) == y for member in members])
        return (right * weights[:, None]).sum(0)

    def nearest(member, images):
        z = images.clone().requires_grad_()
        logits = member(z)
        values, classes = logits.topk(min((neighbours or 10**6) + 1, logits.shape[1]))
        gradients = [
            torch.autograd.grad(logits.gather(1, c[:, None]).sum(), z, retain_graph=True)[0]
            for c in classes.T
        ]
        best, normal = x.new_full((len(x),), torch.inf), torch.zeros_like(x)
        for value, gradient in zip(values.detach().T[1:], gradients[1:], strict=True):
            w = gradients[0] - gradient
            zeta = (values.detach()[:, 0] - value).abs() / (threat.dual(w) + 1e-10)
            closer = zeta < best
            best = torch.where(closer, zeta, best)
            normal = torch.where(per_image(closer), w, normal)
        return normal, best

    order = sorted(range(len(members)), key=lambda i: (float(weights[i]), i), reverse=True)
    delta, best = torch.zeros_like(x) if start is None else start - x, expected(x)
    for _ in range(steps):
        local, local_best = torch.zeros_like(x), best
        for i in order:
            w, zeta = nearest(members[i], x + delta + local)
            reach = torch.full_like(zeta, step_size)
            if i != order[0]:
                moved = (w * local).flatten(1).sum(1) / (threat.dual(w) + 1e-10)
                back = step_size / (step_size - zeta + 1e-10) * (moved + zeta).abs()
                reach = torch.where(zeta < step_size, back + 0.05 * threat.eps, reach)
            step = local + per_image(reach) * threat.steepest(-w)
            step = step * per_image(step_size / (threat.size(step) + 1e-10))
            score = expected(threat.project(x + delta + step, x))
            accept = score <= local_best
            local = torch.where(per_image(accept), step, local)
            local_best = torch.where(accept, score, local_best)
        candidate = threat.project(x + delta + local, x) - x
        score = expected(x + candidate)
        accept = score <= best
        delta = torch.where(per_image(accept), candidate, delta)
        best = torch.where(accept, score, best)
    return x + delta
