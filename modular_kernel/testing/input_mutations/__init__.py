"""Input mutations: defects injected into arguments and outputs, which the checks must detect."""
