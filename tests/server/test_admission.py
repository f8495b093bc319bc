"""Places: a hard count that always comes back."""

import pytest

from tailrace.errors import RequestError
from tailrace.server.admission import Admission


def test_places_are_held_for_the_block_and_given_back_however_it_ends():
    admission = Admission()
    with admission.admitted(2, 3):
        assert admission.sequences == 2
        assert admission.can_admit(1, 3)
        assert not admission.can_admit(2, 3)
    with pytest.raises(KeyError), admission.admitted(3, 3):
        raise KeyError
    assert admission.sequences == 0


def test_a_full_house_refuses_and_keeps_its_count():
    admission = Admission()
    with admission.admitted(3, 4):
        with pytest.raises(RequestError) as caught, admission.admitted(2, 4):
            pass
        assert caught.value.status == 429
        assert "3 of 4" in caught.value.message
        assert admission.sequences == 3
