//! Tests that norms, rotations, activation functions and the exponential are right, and have the same bits on each
//! path.

#![allow(clippy::cast_possible_truncation)] // test sizes are small

use ascend_llm::device::cpu::Isa;
use ascend_llm::device::cpu::kernels::activation::{
    add_row, gelu_tanh_mul_row, gelu_tanh_row, mul_row, relu_mul_row, relu_row, scale_row, silu_mul_row, silu_row,
    softcap_row, sum_row,
};
use ascend_llm::device::cpu::kernels::exp::exp_row;
use ascend_llm::device::cpu::kernels::norm::{add_rms_norm_row, qk_norm_row, rms_norm_row};
use ascend_llm::device::cpu::kernels::rope::{rope_angles, rope_row};
use ascend_llm::device::cpu::reference::{self, Activation};
use ascend_llm::graph::RopeStyle;
use proptest::prelude::*;

fn row() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(-8.0f32..8.0, 1..300)
}

/// Returns the result after checking that all paths of this machine yield the same bits.
fn all(f: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
    let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let plain = f(Isa::Plain);
    for &isa in Isa::available() {
        assert_eq!(bits(&f(isa)), bits(&plain), "{isa:?}");
    }
    plain
}

fn close(got: &[f32], expected: &[f32], bound: f32) {
    assert_eq!(got.len(), expected.len());
    for (a, b) in got.iter().zip(expected) {
        assert!((a - b).abs() <= bound * b.abs().max(1.0), "got {a}, expected {b}");
    }
}

#[test]
fn exp_is_within_two_steps_everywhere() {
    // Every 997th f32 from the smallest argument with a nonzero exponential to the overflow, both signs, and beyond.
    let mut worst = 0.0f64;
    let bits = (0..0x42d0_0000u32).step_by(997).flat_map(|b| [b, b | 0x8000_0000]);
    let arguments: Vec<f32> = bits.map(f32::from_bits).collect();
    let results = all(|isa| {
        let mut row = arguments.clone();
        exp_row(isa, &mut row);
        row
    });
    for (x, y) in arguments.iter().zip(results) {
        let expected = f64::from(*x).exp();
        if expected > f64::from(f32::MAX) {
            assert!(y == f32::INFINITY || expected < 3.402_824e38, "exp({x}) = {y}");
            continue;
        }
        // One step of f32 at `expected`, at least the smallest subnormal.
        let step = (2.0f64).powi((expected.log2().floor() as i32 - 23).max(-149));
        worst = worst.max((f64::from(y) - expected).abs() / step);
    }
    assert!(worst <= 2.0, "{worst} steps");
}

#[test]
fn exp_at_the_ends() {
    let ends = [f32::NEG_INFINITY, -1e30, -104.0, -0.0, 0.0, 89.0, 1e30, f32::INFINITY];
    let results = all(|isa| {
        let mut row = ends.to_vec();
        exp_row(isa, &mut row);
        row
    });
    assert_eq!(results, [0.0, 0.0, 0.0, 1.0, 1.0, f32::INFINITY, f32::INFINITY, f32::INFINITY]);
    for &isa in Isa::available() {
        let mut row = [f32::NAN];
        exp_row(isa, &mut row);
        assert!(row[0].is_nan());
    }
}

#[test]
fn activations_keep_nan() {
    for &isa in Isa::available() {
        for f in [silu_row, gelu_tanh_row, relu_row] {
            let mut row = [f32::NAN; 17];
            f(isa, &mut row);
            assert!(row.iter().all(|x| x.is_nan()));
        }
    }
}

proptest! {
    #[test]
    fn activations_follow_the_reference(x in row(), seed in 0usize..7) {
        let y: Vec<f32> = x.iter().rev().map(|v| v + seed as f32).collect();
        for (kind, alone, gated) in [
            (Activation::Silu, silu_row as fn(Isa, &mut [f32]), silu_mul_row as fn(Isa, &[f32], &[f32], &mut [f32])),
            (Activation::GeluTanh, gelu_tanh_row, gelu_tanh_mul_row),
            (Activation::Relu, relu_row, relu_mul_row),
        ] {
            let mut expected = vec![0.0; x.len()];
            reference::activation(kind, &x, &mut expected);
            let got = all(|isa| {
                let mut row = x.clone();
                alone(isa, &mut row);
                row
            });
            close(&got, &expected, 1e-6);
            let fused = all(|isa| {
                let mut out = vec![0.0; x.len()];
                gated(isa, &x, &y, &mut out);
                out
            });
            // The fused operation and two separate steps yield the same bits.
            let mut two_steps = vec![0.0; x.len()];
            reference::mul(&got, &y, &mut two_steps);
            prop_assert_eq!(fused, two_steps);
        }
    }

    #[test]
    fn sums_and_products_are_exact(x in row()) {
        let y: Vec<f32> = x.iter().rev().copied().collect();
        let (mut sum, mut product) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        reference::add(&x, &y, &mut sum);
        reference::mul(&x, &y, &mut product);
        let three = all(|isa| {
            let (mut a, mut b, mut c) = (vec![0.0; x.len()], x.clone(), vec![0.0; x.len()]);
            sum_row(isa, &x, &y, &mut a);
            add_row(isa, &mut b, &y);
            mul_row(isa, &x, &y, &mut c);
            [a, b, c].concat()
        });
        prop_assert_eq!(three, [sum.clone(), sum, product].concat());
    }

    #[test]
    fn softcap_and_scale(x in row(), cap in 0.5f32..50.0) {
        let capped = all(|isa| {
            let mut row = x.clone();
            softcap_row(isa, &mut row, cap);
            row
        });
        close(&capped, &x.iter().map(|v| cap * (v / cap).tanh()).collect::<Vec<_>>(), 3e-5);
        let scaled = all(|isa| {
            let mut row = x.clone();
            scale_row(isa, &mut row, cap);
            row
        });
        prop_assert_eq!(scaled, x.iter().map(|v| v * cap).collect::<Vec<_>>());
    }

    #[test]
    fn norms_follow_the_reference(x in row(), eps in 1e-6f32..1e-2) {
        let weight: Vec<f32> = x.iter().map(|v| 1.0 + v / 16.0).collect();
        let mut expected = vec![0.0; x.len()];
        reference::rms_norm(&x, &weight, eps, &mut expected);
        let got = all(|isa| {
            let mut out = vec![0.0; x.len()];
            rms_norm_row(isa, &x, &weight, eps, &mut out);
            out
        });
        close(&got, &expected, 2e-6);

        // The norm fused with the residual sum yields the same bits as the two operations in sequence.
        let residual: Vec<f32> = x.iter().rev().copied().collect();
        let fused = all(|isa| {
            let (mut sum, mut out) = (residual.clone(), vec![0.0; x.len()]);
            add_rms_norm_row(isa, &mut sum, &x, &weight, eps, &mut out);
            [sum, out].concat()
        });
        let mut sum = vec![0.0; x.len()];
        reference::add(&residual, &x, &mut sum);
        let mut out = vec![0.0; x.len()];
        rms_norm_row(Isa::detect(), &sum, &weight, eps, &mut out);
        prop_assert_eq!(fused, [sum, out].concat());

        // The norm by heads equals the norm of each head.
        let heads = all(|isa| {
            let mut row = [x.clone(), residual.clone()].concat();
            qk_norm_row(isa, &mut row, &weight, eps);
            row
        });
        let mut second = vec![0.0; x.len()];
        rms_norm_row(Isa::detect(), &residual, &weight, eps, &mut second);
        prop_assert_eq!(heads, [got, second].concat());
    }

    #[test]
    fn rope_follows_the_reference(
        pairs in 1usize..40, rest in 0usize..20, heads in 1usize..4, position in 0u32..5000, interleaved: bool,
    ) {
        let style = if interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
        let head_dim = 2 * pairs + rest;
        let x: Vec<f32> = (0..heads * head_dim).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
        let inv_freq: Vec<f32> = (0..pairs).map(|i| 10000f32.powf(-(i as f32) / pairs as f32)).collect();
        let (mut cos, mut sin) = (vec![0.0; pairs], vec![0.0; pairs]);
        rope_angles(&inv_freq, position, 1.0, &mut cos, &mut sin);
        let mut expected = x.clone();
        reference::rope(&mut expected, heads, head_dim, style, pairs, &cos, &sin);
        let got = all(|isa| {
            let mut row = x.clone();
            rope_row(isa, &mut row, head_dim, style, &cos, &sin);
            row
        });
        close(&got, &expected, 1e-6);
        for (got, x) in got.chunks(head_dim).zip(x.chunks(head_dim)) {
            prop_assert_eq!(&got[2 * pairs..], &x[2 * pairs..]);
        }
        // A rotation keeps lengths, and position 0 changes nothing.
        let length = |row: &[f32]| row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        prop_assert!((length(&got) - length(&x)).abs() < 1e-4 * length(&x).max(1.0));
        if position == 0 {
            prop_assert_eq!(got, x);
        }
    }
}

#[test]
fn angles_are_those_of_the_position() {
    let (mut cos, mut sin) = ([0.0; 3], [0.0; 3]);
    rope_angles(&[1.0, 0.5, 1e-4], 3, 2.0, &mut cos, &mut sin);
    close(&cos, &[2.0 * 3f32.cos(), 2.0 * 1.5f32.cos(), 2.0 * 3e-4f32.cos()], 1e-6);
    close(&sin, &[2.0 * 3f32.sin(), 2.0 * 1.5f32.sin(), 2.0 * 3e-4f32.sin()], 1e-6);
}

#[test]
fn reference_argmax_and_status() {
    assert_eq!(reference::argmax(&[1.0, 3.0, 3.0, -1.0]), 1);
    assert_eq!(reference::argmax(&[f32::NAN, -5.0, f32::NEG_INFINITY]), 1);
    assert_eq!(reference::row_status(&[0.0, 1e38]) as u8, 0);
    assert_eq!(reference::row_status(&[0.0, f32::INFINITY]) as u8, 2);
    let mut out = [0.0; 4];
    reference::gather_rows(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], &[2, 0], 2, &mut out);
    assert_eq!(out, [4.0, 5.0, 0.0, 1.0]);
}
