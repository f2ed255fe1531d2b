"""Pin the choice of experts while a layer is looped.

The idea: in a mixture of experts each evaluation of a looped layer sees another state, and its router may choose other experts: then two
evaluations are not two looks at one function. A hook on the router hands the first evaluation's choice to all later ones.

Paper: "Training-Free Looped Transformers", sections 2.2 and 3.3: it recommends looping layer by layer, which "computes the gating decision
once". Here: its Algorithm 5 asks the router anew in every evaluation, so looping layer by layer pins nothing; this does, in either mode.

Usage:
    with looped(model, mode='layer', pin='mixture'): ...        # the first evaluation's experts and weights, as the paper's text has it
    with looped(model, pin='indices'): ...                      # its experts, with the weights that each evaluation gives them
"""
import torch

from common.errors import Refused

PINS = (None, 'mixture', 'indices')


class Pin:
    "A hook on a router: later evaluations get the first one's experts, with its weights ('mixture') or with weights of their own."

    def __init__(self, loop, how):
        self.loop, self.how = loop, how

    def __call__(self, router, args, output):
        logits, weights, indices = output
        if self.loop.k == 1:
            self.loop.routed[router] = weights, indices         # the loop forgets them when its window is through
            return output
        weights, indices = self.loop.routed[router]
        return logits, weights if self.how == 'mixture' else weigh(router, logits, indices), indices


def weigh(router, logits, indices):
    "The weights that a router gives to chosen experts, by what it has: a correction of sigmoids, a norm, a scale."
    scores = logits.float().sigmoid() if hasattr(router, 'e_score_correction_bias') else logits.float().softmax(-1)
    weights = scores.gather(-1, indices)
    if getattr(router, 'norm_topk_prob', not hasattr(router, 'topk_method')):       # DeepSeek-V2's has the latter, and no norm
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * getattr(router, 'routed_scaling_factor', 1.0)).to(logits.dtype)


def routers_of(layer, pin):
    "The routers of a layer that can be pinned; 'indices' needs one whose weights we know how to make."
    found = [m for m in layer.modules() if type(m).__name__.lower().endswith('topkrouter')]
    for router in found if pin == 'indices' else []:
        x = torch.randn(8, router.weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(router.weight)
        try:
            with torch.no_grad():
                logits, weights, indices = router(x)
                known = torch.allclose(weigh(router, logits, indices).float(), weights.float(), atol=1e-2)
        except (TypeError, ValueError, RuntimeError):           # it wants other arguments, or lies on another machine
            known = False
        if not known:
            raise Refused(f"pin='indices': how {type(router).__name__} weighs its experts is not known here; pin='mixture' keeps its weights")
    return found
