"""A narrow MLP: 192 hidden units instead of 352. The toy asks for depth more than for width."""
out_dir = 'out/mlp'
grow = 'lidas'
grow_block = 2
ffn_dim = 192
eval_every = 100
