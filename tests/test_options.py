"""Fields of a configuration: every one is explained, limited where it can be wrong, and checked."""

import doctest
from dataclasses import fields

import pytest
import yaml

import cramming_nb.engine.options
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.options import read_yaml
from cramming_nb.recipes import RECIPES, Recipe, change, field_help, flat

PARTS = [part for part in vars(Recipe()) if part != "name"]
NAMED = [key for key, value in flat(Recipe()).items() if isinstance(value, str) and key != "corpus.filter_tokenizer"]
STATED_BY_THE_CORPUS = ("architecture.vocab_size", "architecture.max_length")
NUMBERS = [
    key for key, value in flat(Recipe()).items()
    if type(value) in (int, float) and key not in STATED_BY_THE_CORPUS
]
FRACTIONS = [key for key in NUMBERS if type(flat(Recipe())[key]) is float]


def test_examples_of_the_module():
    assert doctest.testmod(cramming_nb.engine.options).attempted >= 4
    assert doctest.testmod(cramming_nb.engine.options).failed == 0


@pytest.mark.parametrize("part", PARTS)
def test_every_field_has_a_meaning(part):
    for field in fields(getattr(Recipe(), part)):
        assert len(field.metadata["meaning"]) > 8


@pytest.mark.parametrize("key", NAMED)
def test_every_named_field_has_choices_and_refuses_others(key):
    with pytest.raises(UserError, match=f"{key} 'no such name': choose one of"):
        change(Recipe(), {key: "no such name"})


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_lower_limit(key):
    with pytest.raises(UserError, match="give a number"):
        change(Recipe(), {key: -1})


@pytest.mark.parametrize("key", FRACTIONS)
def test_not_a_number_is_refused(key):
    with pytest.raises(UserError, match="give a finite number"):
        change(Recipe(), {key: float("nan")})


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_keep_their_own_limits(name):
    assert change(RECIPES[name], {}) == RECIPES[name]
    assert set(field_help(RECIPES[name])) == set(flat(RECIPES[name]))


def test_yaml_may_merge_a_nested_mapping_again():
    text = "- {name: one, set: &s {<<: {x: 0}, x: 1}}\n- {<<: *s, name: two}"
    assert read_yaml(text) == [{"name": "one", "set": {"x": 1}}, {"x": 1, "name": "two"}]


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "{a: {b: 1, b: 1}}", "{[1]: 2}", "a: 1\n---\nb: 2", "a: 2020-02-30", "!!bool z", "[" * 3000])
def test_yaml_that_is_no_configuration_is_a_yaml_error(text):
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)
