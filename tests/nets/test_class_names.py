"""Each class of a data set is the output of the network that its name says, or it is refused."""

import random

import pytest
from timm.data.imagenet_info import ImageNetInfo

from fullstride.tables.class_names import imagenet_words, match_classes, read_class_names

INFO = ImageNetInfo("imagenet-1k")
WNIDS = tuple(INFO.label_names())
WORDS = tuple(INFO.index_to_description(index) for index in range(1000))
NUMBERS = tuple(map(str, range(1000)))
LETTERS = tuple("abcdefghijkl")


def shuffled(names):
    return tuple(random.Random(0).sample(names, len(names)))


def outputs(network, data):
    return match_classes(network, data).outputs


def test_equal_names_in_any_order_and_number_are_found_by_name():
    for data in (LETTERS, shuffled(LETTERS), ("c", "a")):
        match = match_classes(LETTERS, data)
        assert [LETTERS[index] for index in match.outputs] == list(data)
        assert match.how == ""
    assert match_classes(WORDS, WORDS).is_identity  # where two classes are called crane


@pytest.mark.parametrize(
    "data",
    [sorted(NUMBERS), [f"{n:04}" for n in range(1000)], ["7", "10", "999"]],
    ids=["letters", "four digits", "some"],
)
def test_numbers_in_the_order_of_letters_are_the_outputs_of_their_value(data):
    for network in (NUMBERS, WORDS):
        assert outputs(network, data) == tuple(map(int, data))


def test_as_many_numbers_that_count_from_one_are_taken_in_their_order():
    data = sorted(map(str, range(1, 13)))
    assert outputs([str(n) for n in range(12)], data) == tuple(int(name) - 1 for name in data)


@pytest.mark.parametrize("network", [NUMBERS, WORDS, WNIDS], ids=["numbers", "words", "wnids"])
def test_wnids_words_and_numbers_name_the_same_class_of_imagenet(network):
    some = random.Random(1).sample([n for n in range(1000) if "crane" not in WORDS[n]], 40)
    assert outputs(network, WNIDS) == tuple(range(1000))
    assert outputs(network, WORDS) == tuple(range(1000))
    for names in (WNIDS, WORDS):
        assert outputs(network, [names[index] for index in some]) == tuple(some)


def test_a_network_of_some_words_of_imagenet_meets_their_wnids():
    network = ["tench", "cassette player", "English springer"]
    data = [WNIDS[WORDS.index(word)] for word in (WORDS[217], WORDS[0], WORDS[482])]
    assert outputs(network, data) == (2, 0, 1)


def test_words_are_found_without_case_underscores_and_further_synonyms():
    data = ["Great_White_Shark", "TENCH", "tiger-shark", "cardigan"]
    assert [WORDS[index].split(",")[0] for index in outputs(WORDS, data)] == [
        "great white shark",
        "tench",
        "tiger shark",
        "cardigan",  # the jacket, whose whole name it is; the dog has a synonym
    ]


def test_outputs_without_names_are_the_same_number_of_classes_in_their_order():
    for data in (("cat", "dog", "fish"), WNIDS[5:8]):
        match = match_classes(("0", "1", "2"), data, named=False)
        assert match.is_identity
        assert "position" in match.how
        with pytest.raises(ValueError, match="of the network"):
            match_classes(("0", "1", "2"), data)


@pytest.mark.parametrize(
    ("network", "data", "shown"),
    [
        (LETTERS, ("a", "x", "y", "z", "u"), ["4 of the data's 5", "'x', 'y', 'z', ..."]),
        (WORDS, ("crane", "tench"), ["1 of the data's 2", "'crane' of"]),
        (("cat", "Cat "), ("CAT",), ["'CAT'"]),
        (("0", "1", "2"), ("cat", "dog"), ["'cat', 'dog'", "'0', '1', '2'"]),
        (NUMBERS, [*WORDS[:-1], "other"], ["3 of the data's 1000", "'crane', "]),
        (("cat", "dog"), ("Cat", "dog", "cat"), ["1 of the data's 3", "'Cat' of"]),
        (("cat", "dog", "fish"), ("2", "0", "1"), ["'2', '0', '1'"]),
        (NUMBERS, [*WNIDS[:-1], "n99999999"], ["1 of the data's 1000", "'n99999999' of"]),
        (("1", "01"), ("001", "1"), ["'001'"]),
    ],
    ids=range(9),
)
def test_names_that_do_not_tell_are_refused_with_the_first_three_differences(network, data, shown):
    named = tuple(network) != NUMBERS[: len(network)]
    with pytest.raises(ValueError, match="of the network") as caught:
        match_classes(network, data, named=named)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert all(text in str(caught.value) for text in shown)


def test_the_words_of_imagenet_are_those_of_its_number_of_classes():
    assert imagenet_words(1000) == WORDS
    assert len(imagenet_words(11_221)) == 11_221
    assert imagenet_words(3) == ("0", "1", "2")


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"cat\ndog\n", "has 2 lines, the network has 3 outputs"),
        (b"cat\n\ndog\n", "line 2 is empty"),
        (b"c\xffat\ndog\nfish", "UTF-8"),
    ],
)
def test_a_file_of_other_than_a_name_for_each_output_is_refused(content, shown, tmp_path):
    path = tmp_path / "classes.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=shown) as caught:
        read_class_names(path, 3)
    assert str(path) in str(caught.value)
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text("katze, Hauskatze \nHund\nfisch\n\n", encoding)
        assert read_class_names(path, 3) == ("katze, Hauskatze", "Hund", "fisch")
