//! Tests of compile options: presets, options that override them, and the spellings in files.
//!
//! An invalid option is rejected with its name, its value and the valid values.

#![allow(missing_docs, clippy::cast_possible_truncation)]

use ascend_llm::engine::EngineConfig;
use ascend_llm::graph::{CompileError, CompileOptions, Numerics, OverflowPolicy, Precision};

fn read(json: &str) -> CompileOptions {
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{json}: {error}"))
}

fn in_force(options: &CompileOptions) -> (u8, bool) {
    (options.resolved_fusion(), options.resolved_memory_reuse())
}

/// Reads the file of the published articles, and further options.
#[test]
fn every_knob_can_be_read_from_a_file() {
    let options = read(
        r#"{"opt_level": 3, "fusion_level": 2, "memory_reuse": true, "parallel_ops": 4, "precision": "bf16",
            "precision_overrides": {"lm_head": "f32", "layers.0.mlp.down_proj": "f16"}, "overflow": "clamp",
            "attention": {"full_max": 128}, "token_buckets": [1, 8, 64]}"#,
    );
    assert_eq!((options.resolved_parallel_ops(), options.resolved_fusion()), (4, 2));
    assert_eq!(options.resolved_precision(Numerics::Fast), Precision::BF16);
    assert_eq!(options.precision_overrides["lm_head"], Precision::F32);
    assert_eq!((options.attention.full_max, options.attention.partial_max), (128, 2048));
    assert_eq!(
        (options.overflow, options.token_buckets.as_deref()),
        (Some(OverflowPolicy::Clamp), Some([1, 8, 64].as_slice()))
    );
    options.validate(Numerics::Fast).unwrap();
    assert_eq!(read(&serde_json::to_string(&options).unwrap()), options);
    let presets = [1, 1, 1, 4].into_iter().enumerate();
    for (opt_level, parallel_ops) in presets {
        assert_eq!(CompileOptions::preset(opt_level as u8).resolved_parallel_ops(), parallel_ops);
    }
}

#[test]
fn presets_set_the_knobs() {
    assert_eq!(in_force(&CompileOptions::default()), (2, true));
    for (opt_level, expected) in [(0, (0, false)), (1, (1, true)), (2, (2, true)), (3, (3, true))] {
        let options = CompileOptions::preset(opt_level);
        options.validate(Numerics::Fast).unwrap();
        assert_eq!((options.resolved_opt_level(), in_force(&options)), (opt_level, expected));
        assert_eq!(options, read(&format!(r#"{{"opt_level": {opt_level}}}"#)));
    }
}

#[test]
fn a_knob_wins_over_the_preset() {
    for opt_level in 0..=CompileOptions::MAX_OPT_LEVEL {
        let preset = CompileOptions::preset(opt_level);
        for fusion in 0..=CompileOptions::MAX_FUSION {
            let mut options = preset.clone();
            options.fusion = Some(fusion);
            assert_eq!(in_force(&options), (fusion, preset.resolved_memory_reuse()));
        }
        for memory_reuse in [false, true] {
            let mut options = preset.clone();
            options.memory_reuse = Some(memory_reuse);
            assert_eq!(in_force(&options), (preset.resolved_fusion(), memory_reuse));
        }
    }
}

#[test]
fn files_may_use_the_usual_spellings() {
    for (json, expected) in [
        (r#"{"fusion": 1}"#, (1, true)),
        (r#"{"fusion_level": 2}"#, (2, true)),
        (r#"{"enable_fusion": "all"}"#, (3, true)),
        (r#"{"enable_fusion": "none"}"#, (0, true)),
        (r#"{"opt_level": 0, "fusion_level": 3}"#, (3, false)),
        (r#"{"opt_level": 3, "memory_reuse": false}"#, (3, false)),
        (
            r#"{"opt_level": 3, "enable_fusion": "all", "memory_reuse": true, "parallel_ops": 1, "precision": "mix"}"#,
            (3, true),
        ),
        (
            r#"{"opt_level": null, "fusion": null, "memory_reuse": null, "parallel_ops": null, "precision": null}"#,
            (2, true),
        ),
        ("{}", (2, true)),
    ] {
        let options = read(json);
        assert_eq!(in_force(&options), expected, "{json}");
        options.validate(Numerics::Fast).unwrap();
        assert_eq!(read(&serde_json::to_string(&options).unwrap()), options, "{json}");
    }
    assert_eq!(read(r#"{"precision": "f32"}"#).precision, Some(Precision::F32));
    for (name, policy) in [
        ("\"error\"", Some(OverflowPolicy::Error)),
        ("\"clamp\"", Some(OverflowPolicy::Clamp)),
        ("\"retry_f32\"", Some(OverflowPolicy::RetryF32)),
        ("null", None),
    ] {
        let options = read(&format!(r#"{{"overflow": {name}}}"#));
        assert_eq!(options.overflow, policy);
        assert_eq!(read(&serde_json::to_string(&options).unwrap()), options, "{name}");
    }
    let config: EngineConfig = serde_json::from_str(r#"{"compile": {"fusion_level": 3}}"#).unwrap();
    assert_eq!(config.compile.fusion, Some(3));
}

#[test]
fn files_are_refused_with_the_reason() {
    let expected_number = "expected a number from 1 to 4";
    for (json, words) in [
        (r#"{"opt_level": 4}"#, "compile option opt_level: got 4, expected a level from 0 to 3"),
        (r#"{"opt_level": -1}"#, "compile option opt_level: got -1, expected a level from 0 to 3"),
        (r#"{"opt_level": 258}"#, "compile option opt_level: got 258, expected a level from 0 to 3"),
        (r#"{"opt_level": 1.0}"#, "compile option opt_level: got 1.0, expected a level from 0 to 3"),
        (r#"{"opt_level": "all"}"#, "compile option opt_level: got \"all\", expected a level from 0 to 3"),
        (r#"{"fusion_level": 4}"#, "compile option fusion: got 4, expected a level from 0 to 3"),
        (r#"{"enable_fusion": "some"}"#, "compile option fusion: got \"some\", expected a level from 0 to 3"),
        (r#"{"enable_fusion": true}"#, "compile option fusion: got true, expected a level from 0 to 3"),
        (r#"{"fusion": [1]}"#, "compile option fusion"),
        (r#"{"memory_reuse": 1}"#, "compile option memory_reuse: got 1, expected true or false"),
        (r#"{"memory_reuse": "off"}"#, "compile option memory_reuse: got \"off\", expected true or false"),
        (r#"{"parallel_ops": 5}"#, &format!("compile option parallel_ops: got 5, {expected_number}")),
        (r#"{"parallel_ops": 0}"#, &format!("compile option parallel_ops: got 0, {expected_number}")),
        (r#"{"precision": "fp16"}"#, "compile option precision: got \"fp16\", expected \"f32\""),
        (r#"{"precision_overrides": {"q_proj": "half"}}"#, "unknown variant `half`"),
        (r#"{"overflow": "ignore"}"#, "compile option overflow: got \"ignore\", expected \"error\", \"clamp\""),
        (r#"{"overflow": true}"#, "compile option overflow: got true, expected \"error\""),
        (r#"{"attention": {"full": 3}}"#, "unknown field `full`"),
        (r#"{"token_buckets": [-1]}"#, "invalid value: integer `-1`"),
        (r#"{"precision": 16}"#, "compile option precision: got 16, expected \"f32\""),
        (r#"{"fusion": 2, "fusion_level": 2}"#, "duplicate field `fusion`"),
        (r#"{"pipeline_depth": 2}"#, "unknown field `pipeline_depth`"),
        (r#"{"capture": true}"#, "unknown field `capture`"),
    ] {
        let error = serde_json::from_str::<CompileOptions>(json).expect_err(json).to_string();
        assert!(error.contains(words), "{json}: {error}");
    }
}

#[test]
fn code_is_refused_with_the_reason() {
    type Change = fn(&mut CompileOptions);
    let cases: [(Numerics, Change, &str, &str); 7] = [
        (Numerics::Fast, |o| o.opt_level = Some(4), "opt_level", "4"),
        (Numerics::Fast, |o| o.fusion = Some(255), "fusion", "255"),
        (Numerics::Fast, |o| o.parallel_ops = Some(5), "parallel_ops", "5"),
        (Numerics::Fast, |o| o.parallel_ops = Some(0), "parallel_ops", "0"),
        (Numerics::Exact, |o| o.precision = Some(Precision::F16), "precision", "f16"),
        (Numerics::Fast, |o| o.attention.full_max = 2049, "attention", "full_max 2049 above partial_max 2048"),
        (Numerics::Exact, |o| o.precision = Some(Precision::Mix), "precision", "mix"),
    ];
    for (numerics, change, field, got) in cases {
        let mut options = CompileOptions::default();
        change(&mut options);
        match options.validate(numerics) {
            Err(CompileError::Option { option, value, expected }) => {
                assert_eq!((option, value.as_str()), (field, got));
                assert!(!expected.is_empty());
            }
            other => panic!("{field}: {other:?}"),
        }
    }
    let sound = [Precision::F32, Precision::BF16, Precision::F16, Precision::Mix].map(|p| (Numerics::Fast, p));
    for (numerics, precision) in sound.into_iter().chain([(Numerics::Exact, Precision::F32)]) {
        let mut options = CompileOptions::default();
        (options.precision, options.parallel_ops) = (Some(precision), Some(4));
        options.validate(numerics).unwrap();
    }
}
