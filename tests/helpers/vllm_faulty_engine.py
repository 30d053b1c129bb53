"""An engine with vLLM's experts classes and those of `vllm_faulty_classes`."""

from typing import Any

from modular_kernel.integrations.vllm import classes


def load_engine() -> Any:
    engine: Any = classes.load_engine()
    from vllm_faulty_classes import FAULTY, Refusing

    for cls in FAULTY:
        engine.add_class(cls)
        if cls is not Refusing:
            engine.without_predicates = {**engine.without_predicates, cls.__name__: ("none",)}
    return engine


if __name__ == "__main__":
    classes.run_program()
