"""LIDAS, whose two middle layers run twice from the first step of the decay on (the paper's retrofitted recurrence)."""
out_dir = 'out/lidas_cooldown_loop'
grow = 'lidas'
grow_block = 2
cooldown_loop = '3-2x2-3'
