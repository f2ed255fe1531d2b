"""The study's ordinary model: 10 layers, and chains whose deepest depth it does not master.

2.7 million parameters, 520 steps of 2,048 tokens, 1.93e13 FLOPs: 7 minutes on one CPU core. First:
python data/toy/prepare.py --depths=5 --values=3 --out=data/chains. Expect depth 0 by step 275,
depth 2 by 425, and depth 4, the deepest in the mix, at 40 to 80% in the end, where guessing among
three values gives 33%. Depth 5 and 6 are asked, and stay out of the mix.
"""
out_dir = 'out/chains_baseline'
data = 'data/chains'
n_layer = 10
steps = 520
decay_steps = 104
