"""What is read from the texts of compiled programs."""

import jax
import jax.numpy as jnp

from jaxpp import hlo

TEXT = """
%once (p: f32[8]) -> f32[8] {
  %copy.0 = f32[4096,4096]{1,0} copy(%p)
}

%fused (p: f32[8]) -> f32[8] {
  ROOT %copy.1 = f32[1024,1024]{1,0} copy(%p)
}

%x (p: bf16[4]) -> bf16[4] {
  %copy.2 = bf16[2048,1024]{1,0} copy(%p)
  %product.2 = (bf16[2048,1024]{1,0}, s8[8]{0}) custom-call(%a, %b, %copy.2), output_to_operand_aliasing={{0}: (2, {})}
  %copy.21 = (bf16[1024,512]{1,0}, bf16[1024,512]{1,0}) copy-start(%product.2)
}

%y (p: bf16[4]) -> bf16[4] {
  %fusion = f32[1024,1024]{1,0} fusion(%p), kind=kLoop, calls=%fused
}

%body.1 (p: bf16[4]) -> bf16[4] {
  %copy.3 = f32[8]{0} copy(%p)
  %collective-permute-start.1 = (bf16[4]{0}, bf16[4]{0}) collective-permute-start(%p), channel_id=1
  %conditional.1 = (bf16[4]{0}) conditional(%i, %a, %b), branch_computations={%x, %y}
  %collective-permute-done.1 = bf16[4]{0} collective-permute-done(%collective-permute-start.1)
  %collective-permute-start.2 = (bf16[4]{0}, bf16[4]{0}) collective-permute-start(%p), channel_id=2
  %collective-permute-done.2 = bf16[4]{0} collective-permute-done((bf16[4]{0}, bf16[4]{0}) %collective-permute-start.2)
  %conditional.2 = (bf16[4]{0}) conditional(%i, %a, %b), branch_computations={%x, %y}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %copy.4 = f32[2048,2048]{1,0} copy(%p)
  %fusion.1 = f32[4096,4096]{1,0} fusion(%p), kind=kLoop, calls=%once
  %while = (bf16[4]) while(%fusion.1), condition=%until, body=%body.1
}
"""


def test_computations_of_a_loop_are_its_body_and_all_that_it_calls() -> None:
    assert sorted(hlo.of_loops(TEXT)) == ["body.1", "fused", "x", "y"]


def test_large_copies_are_those_of_loops_and_apart_where_a_product_adds_to_them() -> None:
    assert hlo.large_copies(TEXT) == {"addends": [2**22], "others": [2**22, 2**20]}
    assert hlo.large_copies(TEXT, 1) == {"addends": [2**22], "others": [2**22, 2**20, 32]}


def test_a_send_overlaps_where_a_slot_stands_between_its_start_and_its_end() -> None:
    assert hlo.overlaps(TEXT) == [True, False]


def test_loops_of_a_real_program() -> None:
    """A scan whose carry is rotated, which the compiler can do by a copy alone, beside a product that runs once."""

    def run(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        (a, b), _ = jax.lax.scan(lambda carry, _: ((carry[1], jnp.sin(carry[0])), None), (a, b @ b), length=5)
        return a, b

    text = jax.jit(run).lower(*[jnp.ones((512, 512))] * 2).compile().as_text()
    loops = "".join(hlo.of_loops(text).values())
    assert "sine" in loops
    assert " dot(" in text and " dot(" not in loops
