"""The baseline, whose two middle layers run twice from the first step of the decay on: partner of lidas_cooldown_loop.py."""
out_dir = 'out/baseline_cooldown_loop'
cooldown_loop = '3-2x2-3'
