"""Loop a frozen model's middle layers, ours or Hugging Face's, and undo it without a trace.

The idea: a window g of residual layers adds F(x) = g(x) - x to the stream x. That is one Euler step
of length 1 on x' = F(x), and the later layers were trained on where it ends. Running the window K
times goes K such steps, to states that they have never seen. So take K steps of length 1/K instead:
they end near the same place, but each step reads what the one before it has written.

Why beta: near is not there. The result goes back towards the plain output by the share beta. 1 is
the plain model and 0 the small steps alone, so that beta says how far the later layers are taken
from what they know.

Paper: "Training-Free Looped Transformers", sections 2 and 3, appendices D and P (which settings).

Usage:
    with looped(model, window=(3, 5), method='rk', K=3, beta=0.5) as m: m.generate(tokens, 20)
    patch(model, 'mid4'); unpatch(model)                # the same without a `with`
    python wrapper.py HF_FOLDER --window=mid4 --K=3 --tasks=arc_easy    # plain and looped, scored
"""
import contextlib

from nanodepth.common.errors import check_choice
from nanodepth.looping.patch import install, unpatch
from nanodepth.looping.solvers import MORE, bind, lerp

# --------------------------------------------------------------------------- the idea, by hand

def looped_by_hand(model, tokens, a, b, K, beta=0.5):
    "Logits of a model of ours with its layers a to b looped."
    def g(x):                               # one pass through the window
        return model.run(x, model.order[a:b + 1], position=a)
    x = model.run(model.embed(tokens), model.order[:a])
    plain = g(x)
    x = x + (plain - x) / K                 # the first of K small steps reuses `plain`
    for _ in range(K - 1):
        x = x + (g(x) - x) / K
    x = beta * plain + (1 - beta) * x       # a part of the way back to the plain output
    x = model.run(x, model.order[b + 1:], position=b + 1)
    return model.head(model.norm(x))


# ------------------------------------------------------------------ ways to run a window K times
# lerp(x, y, h) is x + h (y - x), rounded so that h = 1 gives y itself: K = 1 is the plain window.

def naive(g, x, K):
    "The window K times: steps of length 1, to time K."
    for _ in range(K):
        x = g(x)
    return x


def rk(g, x, K, beta=0.5, T=1):
    """looped_by_hand's K Euler steps to the time T, and the way back. All of it is one Runge-Kutta
    step of K stages (Eq. 13 to 16), hence the name."""
    plain = g(x)
    x = lerp(x, plain, T / K)
    for _ in range(K - 1):
        x = lerp(x, g(x), T / K)
    return lerp(x, plain, beta)             # beta plain + (1 - beta) x


SOLVERS = dict(naive=naive, rk=rk, **MORE)          # MORE: those of looping/solvers.py


def pick_solver(method, K, beta=None, **options):
    "(solver(g, x), how often it evaluates g), or an error in one line."
    check_choice('method', method, list(SOLVERS))
    return bind(method, SOLVERS[method], K, beta, **options)


# ------------------------------------------------------------------- any model, with its KV cache

def patch(model, window=None, method='rk', K=3, beta=None, cache=None, decode='full', mode=None,
          pin=None, **options):
    """Loop a window of a model's layers from now on; unpatch(model) undoes it.

    window   (3, 5), both included; 'mid4', the middle four, if none is given; 0.5, the four centred
             on that fraction of the depth
    K, beta  rk's, whose beta is 0.5 if none is given; others' options are in looping/solvers.py
    cache    which pass later tokens see in the KV cache: 'first', the plain one, is the paper's
    others   rarely needed: looping/patch.py explains decode, mode and pin"""
    solver, evaluations = pick_solver(method, K, beta, **options)
    return install(model, window, method, solver, evaluations, cache, decode, mode, pin)


@contextlib.contextmanager
def looped(model, window=None, method='rk', K=3, beta=None, **options):
    "patch inside a `with`."
    patch(model, window, method, K, beta, **options)
    try:
        yield model
    finally:
        unpatch(model)


if __name__ == '__main__':
    from nanodepth.__main__ import main as nanodepth
    nanodepth('evaluate')
