//! Tests that rotary frequencies equal those of the public reference.

#![allow(clippy::cast_possible_truncation)] // test sizes are small

use ascend_llm::model::rope::RopeScaling;
use serde_json::Value;

#[test]
fn tables_are_equal() {
    let cases: Value = serde_json::from_str(include_str!("../data/cases/rope.json")).unwrap();
    let cases = cases["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let params = &case["params"];
        let number = |key: &str| params[key].as_f64().unwrap();
        let old = || params["old"].as_u64().unwrap() as u32;
        let scaling = match case["rope_type"].as_str().unwrap() {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: number("factor") },
            "llama3" => RopeScaling::Llama3 {
                factor: number("factor"),
                low_freq_factor: number("low"),
                high_freq_factor: number("high"),
                original_max_position_embeddings: old(),
            },
            "yarn" => yarn(number("factor"), old(), None, None, None, true),
            other => panic!("{other}"),
        };
        let (got, factor) =
            scaling.inv_freq(case["head_dim"].as_u64().unwrap() as usize, case["rope_theta"].as_f64().unwrap());
        let expected: Vec<f64> =
            case["expect"]["inv_freq"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        assert_eq!(got.len(), expected.len());
        for (a, b) in got.iter().zip(&expected) {
            assert!((f64::from(*a) - b).abs() <= 1e-5 * b, "{}: got {a}, expected {b}", case["id"]);
        }
        let expected = case["expect"]["attention_factor"].as_f64().unwrap();
        assert!((f64::from(factor) - expected).abs() <= 1e-6, "{}: factor {factor}", case["id"]);
    }
}

fn yarn(
    factor: f64,
    old: u32,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: bool,
) -> RopeScaling {
    RopeScaling::Yarn {
        factor,
        original_max_position_embeddings: old,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor,
        mscale,
        mscale_all_dim,
        truncate,
    }
}

#[test]
fn the_factor_of_yarn() {
    let factor = |a, b, c| f64::from(yarn(40.0, 4096, a, b, c, true).inv_freq(64, 1e4).1);
    let scale = |coefficient: f64| 0.1 * coefficient * 40f64.ln() + 1.0;
    for (got, expected) in [
        (factor(None, None, None), scale(1.0)),
        (factor(Some(1.5), Some(1.0), Some(0.5)), 1.5),
        (factor(None, Some(1.0), Some(0.5)), scale(1.0) / scale(0.5)),
        (factor(None, Some(0.7), Some(0.7)), 1.0),
        // If only one of the two factors is given, it is not used.
        (factor(None, Some(0.7), None), scale(1.0)),
    ] {
        assert!((got - expected).abs() < 1e-6, "got {got}, expected {expected}");
    }
}

#[test]
fn yarn_lies_between_kept_and_stretched() {
    let plain = RopeScaling::Default.inv_freq(64, 1e4).0;
    for truncate in [true, false] {
        let scaled = yarn(8.0, 4096, None, None, None, truncate).inv_freq(64, 1e4).0;
        assert_eq!(scaled[0], plain[0]);
        assert!((scaled[31] * 8.0 / plain[31] - 1.0).abs() < 1e-6);
        assert!(scaled.iter().zip(&plain).all(|(s, p)| *s <= *p && *s >= p / 8.000_01));
    }
    // Ends of the ramp that are not rounded yield other frequencies.
    let ramp = |truncate| yarn(8.0, 4096, None, None, None, truncate).inv_freq(64, 1e4).0;
    assert_ne!(ramp(true), ramp(false));
}
