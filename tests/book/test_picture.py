"Test training/picture.py: the picture that a run draws."
import pytest

from training.picture import draw


def test_a_picture_has_a_panel_for_losses_and_one_for_answers(tmp_path, monkeypatch):
    figure = pytest.importorskip('matplotlib.figure')
    figures, real = [], figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, 'savefig', lambda self, file, **how: (
        figures.append(self), real(self, file, **how)))
    log = [dict(step=step, depth=2 + step // 2, loss=3.0 - step, val_loss=4.0 - step,
                kinds=dict(text=dict(loss=2.0), copy=dict(accuracy=step / 4)))
           for step in range(4)]
    log[2]['grown'] = {}
    draw(dict(one=log), tmp_path / 'loss.png')
    left, right = figures[0].axes
    curves = [curve for curve in left.lines if len(curve.get_xdata()) == 4]
    assert [curve.get_label() for curve in curves] == ['training', 'validation', 'on text alone']
    assert curves[1].get_ydata().tolist() == [4, 3, 2, 1]
    assert right.lines[0].get_ydata().tolist() == [0, 25, 50, 75]
    assert [text.get_text() for text in right.texts] == ['copy ', ' 2 layers', ' 3 layers']
    assert (tmp_path / 'loss.png').read_bytes()[:4] == b'\x89PNG'
