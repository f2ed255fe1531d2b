"""The study's ordinary model: 10 layers, and chains that its deepest depth does not master.

2.7 million parameters, 600 steps of 2,048 tokens, 2.47e13 FLOPs: 8 minutes on one CPU core. First:
python data/toy/prepare.py --depths=5 --values=3 --out=data/chains. Expect depth 0 by step 275,
depth 2 by 450, and depth 4, the deepest in the mix, at 40 to 80% in the end, where guessing among
three values is 33%. Depth 5 and 6 stay out of the mix.
"""
out_dir = 'out/chains_baseline'
data = 'data/chains'
n_layer = 10
