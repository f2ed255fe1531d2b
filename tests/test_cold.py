"What somebody with a checkpoint of others met on a first day."
import pytest

from nanodepth.common.errors import Refused
from nanodepth.looping.caches import Window


@pytest.mark.parametrize('options, words', [(dict(k=3), 'it takes: K, beta, T'),
                                            (dict(K=2.5), 'not of its kind: .*2.5')])
def test_a_window_names_the_option_that_was_wrong(options, words):
    with pytest.raises(Refused, match=words):
        Window([1, 2], 'rk', **options)
