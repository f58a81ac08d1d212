"""Hypothesis for runs with a mutant: always the same examples, and none made smaller: it is enough that one fails."""

from hypothesis import HealthCheck, Phase, settings

EXAMPLES = 200

settings.register_profile(
    "mutants",
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
