//! Tests that model descriptions are read as their model families define them: `config.json` in both spellings, GGUF
//! metadata.
//!
//! Invalid or unsupported values are rejected with the name of the field.

#![allow(missing_docs, clippy::cast_possible_truncation)] // sizes here are small

use std::path::{Path, PathBuf};

use crate::common::goldens::conformance_models;
use ascend_llm::graph::{Graph, Op};
use ascend_llm::model::rope::RopeScaling;
use ascend_llm::model::{
    Architecture, AttentionConfig, GatedMlp, GroupedQueryAttention, LayerConfig, MlpConfig, ModelConfig, ModelError,
    NormConfig, OutputHead, config_from_gguf, config_from_hub, decoder_graph, gguf_conventions,
};
use ascend_llm::weights::gguf::Gguf;
use ascend_llm::weights::safetensors::SafetensorsFolder;
use ascend_llm::weights::{DType, MemorySource, TensorView, WeightSource};
use serde_json::{Map, Value, json};

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn object(path: &Path) -> Map<String, Value> {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn read(config: &Map<String, Value>) -> Result<ModelConfig, ModelError> {
    config_from_hub(&serde_json::to_vec(config).unwrap())
}

/// Returns the configuration of a small Llama with `changes` applied.
fn llama(changes: &Value) -> Map<String, Value> {
    let base = json!({
        "model_type": "llama", "vocab_size": 10, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    });
    let mut config = base.as_object().unwrap().clone();
    config.extend(changes.as_object().unwrap().clone());
    config
}

/// Returns the attention of a layer.
fn attention(layer: &LayerConfig) -> &GroupedQueryAttention {
    let AttentionConfig::GroupedQuery(attention) = &layer.attention else { panic!("{layer:?}") };
    attention
}

fn attention_mut(layer: &mut LayerConfig) -> &mut GroupedQueryAttention {
    let AttentionConfig::GroupedQuery(attention) = &mut layer.attention else {
        panic!("the layer has another kind of attention")
    };
    attention
}

/// Returns the width of a layer's MLP, and whether it has a bias.
fn mlp(layer: &LayerConfig) -> (usize, bool) {
    let MlpConfig::Gated(GatedMlp { intermediate_size, bias, .. }) = layer.mlp else { panic!("{layer:?}") };
    (intermediate_size, bias)
}

fn windows_of(config: &ModelConfig) -> Vec<Option<u32>> {
    config.layers.iter().map(|layer| attention(layer).window).collect()
}

/// Returns zero tensors of all shapes that the configuration requires; `lm_head` only if it is not tied.
fn source(config: &ModelConfig) -> MemorySource {
    let mut source = MemorySource::new();
    let mut add = |name: String, shape: &[usize]| {
        source.insert_f32(name, DType::F32, shape, &vec![0.0; shape.iter().product()]).unwrap();
    };
    let h = config.hidden_size;
    add("model.embed_tokens.weight".into(), &[config.vocab_size, h]);
    add("model.norm.weight".into(), &[h]);
    if config.head == OutputHead::Untied {
        add("lm_head.weight".into(), &[config.vocab_size, h]);
    }
    for (index, layer) in config.layers.iter().enumerate() {
        let GroupedQueryAttention { heads, kv_heads, head_dim, .. } = *attention(layer);
        let (q, kv, i) = (heads * head_dim, kv_heads * head_dim, mlp(layer).0);
        for (name, shape) in [
            ("self_attn.q_proj", [q, h]),
            ("self_attn.k_proj", [kv, h]),
            ("self_attn.v_proj", [kv, h]),
            ("self_attn.o_proj", [h, q]),
            ("mlp.gate_proj", [i, h]),
            ("mlp.up_proj", [i, h]),
            ("mlp.down_proj", [h, i]),
        ] {
            add(format!("model.layers.{index}.{name}.weight"), &shape);
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("model.layers.{index}.{name}.weight"), &[h]);
        }
    }
    source
}

fn shape_of<'a>(graph: &'a Graph, name: &str) -> &'a [usize] {
    &graph.weights.iter().find(|weight| weight.name == name).unwrap_or_else(|| panic!("{name}")).shape
}

/// Returns the field that an error names, and its message.
fn named(error: &ModelError) -> (String, String) {
    let name = match error {
        ModelError::UnsupportedArchitecture { name }
        | ModelError::MissingTensor { name }
        | ModelError::UnusableTensor { name, .. }
        | ModelError::TensorShape { name, .. } => name,
        ModelError::UnsupportedFeature { field, .. }
        | ModelError::InvalidField { field, .. }
        | ModelError::MissingField { field } => field,
        ModelError::Json { file, .. } => file,
        other => panic!("{other}"),
    };
    (name.clone(), error.to_string())
}

// -------------------------------------------------------------------------------------------------- variants

#[test]
fn open_cases() {
    let cases: Value = serde_json::from_slice(&std::fs::read(data("cases/config_variants.json")).unwrap()).unwrap();
    let cases = cases["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 7);
    for case in cases {
        let id = case["id"].as_str().unwrap();
        let outcome = read(&llama(&case["config"]));
        if id == "c07" {
            let error = outcome.unwrap_err();
            assert!(matches!(error, ModelError::UnsupportedFeature { .. }), "{error}");
            assert!(error.to_string().contains("spiral"), "{error}");
            continue;
        }
        let config = outcome.unwrap_or_else(|error| panic!("{id}: {error}"));
        let graph = decoder_graph(&config, &source(&config)).unwrap();
        let layer = |name: &str| shape_of(&graph, &format!("model.layers.0.self_attn.{name}.weight"));
        match case["expect"].as_object() {
            Some(expected) => {
                for (key, value) in expected {
                    let got = match key.as_str() {
                        "head_dim" => config.head_dim(),
                        "num_kv_heads" => config.kv_heads(),
                        "q_proj_rows" => layer("q_proj")[0],
                        "k_proj_rows" => layer("k_proj")[0],
                        "o_proj_cols" => layer("o_proj")[1],
                        other => panic!("{id}: {other}"),
                    };
                    assert_eq!(got as u64, value.as_u64().unwrap(), "{id}: {key}");
                }
            }
            None => match id {
                "c04" => {
                    let table = graph.nodes.iter().find_map(|node| match &node.op {
                        Op::Embed { table, .. } => Some(*table),
                        _ => None,
                    });
                    let head = graph.nodes.iter().rev().find_map(|node| match &node.op {
                        Op::Linear(part) => Some(part.weight),
                        _ => None,
                    });
                    assert!(table.is_some() && table == head);
                }
                "c05" => assert_eq!(config.ropes[0].scaling, RopeScaling::Linear { factor: 2.0 }),
                "c06" => assert_eq!(config.ropes[0].scaling, RopeScaling::Default),
                other => panic!("{other}"),
            },
        }
    }
}

#[test]
fn both_spellings_mean_the_same() {
    for folder in conformance_models() {
        let [new, older] = ["config.json", "config.hub-style.json"].map(|name| object(&folder.join(name)));
        assert_ne!(new, older, "{}", folder.display());
        assert_eq!(read(&new).unwrap(), read(&older).unwrap(), "{}", folder.display());
    }
}

#[test]
fn absent_and_null_mean_the_familys_default() {
    let optional = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "hidden_act",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "eos_token_id",
        "layer_types",
        "use_sliding_window",
        "max_window_layers",
        "quantization_config",
    ];
    for family in Architecture::ALL.iter().map(|architecture| architecture.name()) {
        let bare = json!({ "model_type": family }).as_object().unwrap().clone();
        let expected = read(&bare).unwrap();
        for field in optional {
            let mut config = bare.clone();
            config.insert(field.into(), Value::Null);
            assert_eq!(read(&config).unwrap(), expected, "{family}: {field}");
        }
    }
    let (llama, mistral) = (defaults("llama"), defaults("mistral"));
    assert_eq!((llama.hidden_size, llama.layers.len(), llama.kv_heads(), llama.head_dim()), (4096, 32, 32, 128));
    let last = &mistral.layers[31];
    assert_eq!((mistral.kv_heads(), mlp(last).0, attention(last).window), (8, 14_336, Some(4096)));
    let (qwen2, qwen3) = (defaults("qwen2"), defaults("qwen3"));
    assert!(windows_of(&qwen2).iter().all(Option::is_none));
    let (layer2, layer3) = (attention(&qwen2.layers[0]), attention(&qwen3.layers[0]));
    assert!(layer2.qkv_bias && !layer2.output_bias && layer2.qk_norm.is_none());
    assert!(!layer3.qkv_bias && layer3.qk_norm.is_some() && layer3.head_dim == 128);
}

fn defaults(family: &str) -> ModelConfig {
    read(json!({ "model_type": family }).as_object().unwrap()).unwrap()
}

#[test]
fn windows_follow_each_familys_rule() {
    let windows = |family: &str, changes: Value| {
        let mut config = llama(&json!({ "num_hidden_layers": 4, "num_key_value_heads": 4, "model_type": family }));
        config.extend(changes.as_object().unwrap().clone());
        read(&config).map(|config| windows_of(&config))
    };
    let w = Some(8);
    assert_eq!(windows("llama", json!({ "sliding_window": 8 })).unwrap(), [None; 4]);
    assert_eq!(windows("mistral", json!({ "sliding_window": 8 })).unwrap(), [w; 4]);
    // Mistral has no `use_sliding_window`, so only null disables its window.
    assert_eq!(windows("mistral", json!({ "sliding_window": 8, "use_sliding_window": false })).unwrap(), [w; 4]);
    assert_eq!(windows("mistral", json!({ "sliding_window": null })).unwrap(), [None; 4]);
    assert_eq!(windows("qwen2", json!({ "sliding_window": 8 })).unwrap(), [None; 4]);
    let on = json!({ "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3 });
    assert_eq!(windows("qwen2", on).unwrap(), [None, None, None, w]);
    let types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"];
    let by_type = json!({ "sliding_window": 8, "use_sliding_window": true, "layer_types": types });
    assert_eq!(windows("qwen3", by_type).unwrap(), [None, w, None, w]);
    for (changes, field) in [
        (json!({ "layer_types": types }), "layer_types"),
        (json!({ "layer_types": ["full_attention"] }), "layer_types"),
        (json!({ "layer_types": "full_attention" }), "layer_types"),
        (json!({ "layer_types": vec!["linear_attention"; 4] }), "layer_types"),
        (json!({ "layer_types": [1, 2, 3, 4] }), "layer_types"),
        (json!({ "sliding_window": 0, "use_sliding_window": true }), "sliding_window"),
        (json!({ "sliding_window": 1u64 << 40, "use_sliding_window": true }), "sliding_window"),
    ] {
        let error = windows("qwen3", changes.clone()).unwrap_err();
        assert_eq!(named(&error).0, field, "{changes}: {error}");
    }
}

#[test]
fn rope_parameters_are_found_at_each_place() {
    let scaling = |changes: Value| read(&llama(&changes)).map(|mut config| config.ropes.remove(0));
    let yarn = |original: u32| RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: original,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    };
    let given = json!({ "rope_type": "yarn", "factor": 4.0 });
    // Without an original length: the length given next to the scaling, else the model's own.
    let rope = scaling(json!({ "rope_scaling": given })).unwrap();
    assert_eq!((rope.scaling, rope.theta), (yarn(64), 10_000.0));
    let rope = scaling(json!({ "rope_scaling": given, "original_max_position_embeddings": 16 })).unwrap();
    assert_eq!(rope.scaling, yarn(16));
    let inner =
        json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e5 });
    let rope = scaling(json!({ "rope_parameters": inner, "rope_theta": 7.0 })).unwrap();
    assert_eq!((rope.scaling, rope.theta), (yarn(32), 5e5));
    let rope = scaling(json!({ "partial_rotary_factor": 0.5 })).unwrap();
    assert_eq!((rope.dim, rope.theta), (2, 10_000.0));
    let rope = scaling(json!({ "rope_parameters": { "partial_rotary_factor": 0.5, "rope_theta": 3.0 } })).unwrap();
    assert_eq!((rope.dim, rope.theta), (2, 3.0));
    // Parameters for a single layer type must not be read as those of all layers.
    let sets = json!({ "full_attention": { "rope_type": "default", "rope_theta": 5.0 } });
    let error = scaling(json!({ "rope_parameters": sets })).unwrap_err();
    assert_eq!(named(&error).0, "rope_parameters.full_attention");
}

// -------------------------------------------------------------------------------------------------- refusals

#[test]
fn other_architectures_are_refused_by_name() {
    let mut count = 0;
    for entry in std::fs::read_dir(data("configs")).unwrap() {
        let path = entry.unwrap().path();
        let mut config = object(&path);
        let name = config["model_type"].as_str().unwrap().to_owned();
        if Architecture::from_hub(&name).is_ok() {
            continue; // this family is supported; other tests cover it
        }
        assert_eq!(read(&config).unwrap_err(), ModelError::UnsupportedArchitecture { name: name.clone() });
        // Without `model_type`, the class name determines the family.
        config.remove("model_type");
        let class = config["architectures"][0].as_str().unwrap().to_owned();
        assert_eq!(read(&config).unwrap_err(), ModelError::UnsupportedArchitecture { name: class });
        let text = ModelError::UnsupportedArchitecture { name }.to_string();
        assert!(Architecture::ALL.iter().all(|known| text.contains(known.name())), "{text}");
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn the_class_name_will_do() {
    for (class, architecture) in [
        ("LlamaForCausalLM", Architecture::Llama),
        ("MistralForCausalLM", Architecture::Mistral),
        ("Qwen2ForCausalLM", Architecture::Qwen2),
        ("Qwen3ForCausalLM", Architecture::Qwen3),
    ] {
        let config = json!({ "architectures": [class] }).as_object().unwrap().clone();
        assert_eq!(read(&config).unwrap().architecture, architecture);
    }
    for (config, field) in [
        (json!({}), "model_type"),
        (json!({ "architectures": [] }), "model_type"),
        (json!({ "architectures": [7] }), "model_type"),
        (json!({ "architectures": "LlamaForCausalLM" }), "architectures"),
        (json!({ "model_type": 7 }), "model_type"),
    ] {
        let error = read(config.as_object().unwrap()).unwrap_err();
        assert_eq!(named(&error).0, field, "{config}: {error}");
    }
}

#[test]
fn what_would_change_the_numbers_is_refused_by_name() {
    for (changes, field, value) in [
        (
            json!({ "quantization_config": { "quant_method": "gptq", "bits": 4 } }),
            "quantization_config.quant_method",
            "gptq",
        ),
        (json!({ "quantization_config": {} }), "quantization_config.quant_method", "unnamed"),
        (json!({ "quantization_config": "awq" }), "quantization_config.quant_method", "unnamed"),
        (json!({ "is_encoder_decoder": true }), "is_encoder_decoder", "true"),
        (json!({ "add_cross_attention": true }), "add_cross_attention", "true"),
        (json!({ "hidden_act": "gelu" }), "hidden_act", "gelu"),
        (json!({ "hidden_act": "relu2" }), "hidden_act", "relu2"),
        (json!({ "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 } }), "rope_scaling.rope_type", "dynamic"),
        (json!({ "rope_scaling": { "type": "mrope" } }), "rope_scaling.rope_type", "mrope"),
        (json!({ "rope_parameters": { "rope_type": "longrope" } }), "rope_parameters.rope_type", "longrope"),
    ] {
        let error = read(&llama(&changes)).unwrap_err();
        assert!(matches!(error, ModelError::UnsupportedFeature { .. }), "{changes}: {error}");
        let (name, text) = named(&error);
        assert!(name == field && text.contains(value), "{changes}: {error}");
    }
}

#[test]
fn values_that_cannot_be_are_refused_by_name() {
    let sizes = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ];
    let mut cases: Vec<(Value, &str)> = Vec::new();
    for field in sizes {
        for value in
            [json!(0), json!(1u64 << 62), json!(u64::MAX), json!(-1), json!(1.5), json!("4"), json!([4]), json!(true)]
        {
            let mut changes = Map::new();
            changes.insert(field.into(), value);
            cases.push((Value::Object(changes), field));
        }
    }
    for field in ["rms_norm_eps", "rope_theta", "partial_rotary_factor"] {
        for value in [json!("1"), json!(false), json!({}), json!(-1.0), json!(1e300)] {
            if field == "rope_theta" && value == json!(1e300) {
                continue; // unusual, but the formula accepts this number
            }
            let mut changes = Map::new();
            changes.insert(field.into(), value);
            cases.push((Value::Object(changes), field));
        }
    }
    for field in ["tie_word_embeddings", "attention_bias", "mlp_bias", "is_encoder_decoder"] {
        for value in [json!(1), json!("true"), json!([])] {
            let mut changes = Map::new();
            changes.insert(field.into(), value);
            cases.push((Value::Object(changes), field));
        }
    }
    let llama3 = |low: f64, high: f64| json!({ "rope_scaling": { "rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high } });
    let yarn = |field: &str, value: Value| {
        let mut scaling = json!({ "rope_type": "yarn", "factor": 8.0 }).as_object().unwrap().clone();
        scaling.insert(field.into(), value);
        json!({ "rope_scaling": scaling })
    };
    cases.extend([
        (json!({ "num_key_value_heads": 3 }), "num_key_value_heads"),
        (json!({ "num_key_value_heads": 8 }), "num_key_value_heads"),
        (json!({ "head_dim": 5 }), "rotary dimension"),
        (json!({ "head_dim": 1 << 20 }), "head_dim"),
        (json!({ "partial_rotary_factor": 0.1 }), "rotary dimension"),
        (json!({ "rope_theta": 0 }), "rope_theta"),
        // Its powers exceed f32.
        (json!({ "rope_theta": 1e-300 }), "rope_scaling"),
        (json!({ "rope_scaling": [] }), "rope_scaling"),
        (json!({ "rope_parameters": "yarn" }), "rope_parameters"),
        (json!({ "rope_scaling": { "rope_type": 3 } }), "rope_scaling.rope_type"),
        (json!({ "rope_scaling": { "rope_type": "linear" } }), "rope_scaling.factor"),
        (json!({ "rope_scaling": { "rope_type": "linear", "factor": "2" } }), "rope_scaling.factor"),
        (json!({ "rope_scaling": { "rope_type": "linear", "factor": 0.5 } }), "rope_scaling.factor"),
        (json!({ "rope_parameters": { "rope_type": "linear", "factor": [] } }), "rope_parameters.factor"),
        (json!({ "rope_scaling": { "rope_type": "llama3", "factor": 8 } }), "rope_scaling.low_freq_factor"),
        (llama3(0.0, 4.0), "rope_scaling.low_freq_factor"),
        (llama3(1.0, -4.0), "rope_scaling.high_freq_factor"),
        (llama3(4.0, 1.0), "rope_scaling.high_freq_factor"),
        (llama3(4.0, 4.0), "rope_scaling.high_freq_factor"),
        (yarn("original_max_position_embeddings", json!(0)), "rope_scaling.original_max_position_embeddings"),
        (yarn("original_max_position_embeddings", json!(1u64 << 40)), "rope_scaling.original_max_position_embeddings"),
        (yarn("beta_fast", json!(0)), "rope_scaling.beta_fast"),
        (yarn("beta_fast", json!(0.5)), "rope_scaling.beta_fast"),
        (yarn("beta_slow", json!(-1)), "rope_scaling.beta_slow"),
        (yarn("attention_factor", json!(0)), "rope_scaling.attention_factor"),
        (yarn("truncate", json!(1)), "rope_scaling.truncate"),
        // All dimensions have the same frequency: the ends of the ramp are infinite.
        (
            json!({ "rope_theta": 1, "original_max_position_embeddings": 65536,
                    "rope_scaling": { "rope_type": "yarn", "factor": 8 } }),
            "rope_scaling",
        ),
        (json!({ "eos_token_id": -1 }), "eos_token_id"),
        (json!({ "eos_token_id": [1, "2"] }), "eos_token_id"),
        (json!({ "eos_token_id": 1u64 << 40 }), "eos_token_id"),
        (json!({ "hidden_act": ["silu"] }), "hidden_act"),
        (json!({ "layer_types": [] }), "layer_types"),
    ]);
    for (changes, field) in cases {
        let error = read(&llama(&changes)).expect_err(&changes.to_string());
        assert_eq!(named(&error).0, field, "{changes}: {error}");
    }
}

#[test]
fn what_is_no_json_object_is_refused() {
    for text in [
        "",
        "{",
        "[]",
        "null",
        "7",
        "{\"rope_theta\": NaN}",
        "{\"rope_theta\": Infinity}",
        "{\"rope_theta\": 1e999}",
        "\u{feff}{}",
    ] {
        let error = config_from_hub(text.as_bytes()).unwrap_err();
        assert!(matches!(error, ModelError::Json { .. }), "{text}: {error}");
    }
    assert!(config_from_hub(b"\xff\xfe").is_err());
    assert!(config_from_hub(&b"[".repeat(100_000)).is_err());
}

/// Sets each field of each conformance config to each odd value: the result is an error or a config.
///
/// Neither reading the config nor building the graph panics.
#[test]
fn odd_values_never_panic() {
    let odd = [
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(-1),
        json!(3),
        json!(u64::MAX),
        json!(1u64 << 27),
        json!(0.3),
        json!(1e300),
        json!(-1e-300),
        json!(""),
        json!("x"),
        json!([]),
        json!([null]),
        json!({}),
        json!({ "factor": 1e300 }),
    ];
    let mut refused = 0;
    for folder in conformance_models() {
        let source = SafetensorsFolder::open(&folder).unwrap();
        for spelling in ["config.json", "config.hub-style.json"] {
            let config = object(&folder.join(spelling));
            let mut paths: Vec<Vec<String>> = Vec::new();
            for (key, value) in &config {
                paths.push(vec![key.clone()]);
                paths.extend(
                    value.as_object().into_iter().flat_map(|inner| inner.keys().map(|k| vec![key.clone(), k.clone()])),
                );
            }
            for path in paths {
                for value in &odd {
                    let mut changed = config.clone();
                    match path.as_slice() {
                        [key] => drop(changed.insert(key.clone(), value.clone())),
                        [key, inner] => changed[key][inner] = value.clone(),
                        _ => unreachable!("configs have at most two levels"),
                    }
                    match read(&changed).and_then(|config| {
                        let _ = config.parameters();
                        decoder_graph(&config, &source)
                    }) {
                        Ok(graph) => assert!(!graph.dump().is_empty()),
                        Err(error) => {
                            refused += 1;
                            let (name, text) = named(&error);
                            assert!(!name.is_empty() || text.contains("\"\""), "{text}");
                        }
                    }
                }
            }
        }
    }
    assert!(refused > 1000, "{refused}");
}

#[test]
fn a_changed_configuration_is_checked_before_it_becomes_a_graph() {
    let config = read(&llama(&json!({}))).unwrap();
    let source = source(&config);
    let broken = |field: &str, change: &dyn Fn(&mut ModelConfig)| {
        let mut config = config.clone();
        change(&mut config);
        let error = decoder_graph(&config, &source).unwrap_err();
        assert_eq!(named(&error).0, field, "{error}");
    };
    let first = |config: &mut ModelConfig| *attention_mut(&mut config.layers[0]);
    broken("num_hidden_layers", &|config| config.layers.clear());
    broken("sliding_window", &|config| attention_mut(&mut config.layers[0]).window = Some(0));
    broken("num_attention_heads", &|config| attention_mut(&mut config.layers[0]).heads = 0);
    broken("head_dim", &|config| attention_mut(&mut config.layers[0]).head_dim = usize::MAX);
    broken("attention scale", &|config| attention_mut(&mut config.layers[0]).scale = 0.0);
    broken("embedding_scale", &|config| config.embedding_scale = Some(f32::INFINITY));
    broken("logit_scale", &|config| config.logit_scale = Some(0.0));
    broken("residual_scale", &|config| config.layers[0].residual_scale = Some(f32::NAN));
    broken("rope", &|config| attention_mut(&mut config.layers[0]).rope = Some(1));
    broken("num_key_value_heads", &|config| {
        let mut layer = config.layers[0];
        attention_mut(&mut layer).kv_heads = first(config).heads / 2;
        config.layers.push(layer);
    });
    broken("rms_norm_eps", &|config| config.final_norm = NormConfig::Rms { eps: f32::NAN });
    broken("rope_theta", &|config| config.ropes[0].theta = f64::NAN);
    broken("rope_scaling.factor", &|config| config.ropes[0].scaling = RopeScaling::Linear { factor: f64::NAN });
    broken("rotary dimension", &|config| config.ropes[0].dim = 6);
    broken("rope_freqs.weight", &|config| config.ropes[0].divisors = Some(vec![1.0]));
    broken("rope_freqs.weight", &|config| config.ropes[0].divisors = Some(vec![1.0, 0.0]));
}

/// Each layer of the graph follows its own description, not that of the first layer.
#[test]
fn layers_may_differ_in_rotation_and_window() {
    let mut config = read(&llama(&json!({ "num_hidden_layers": 3 }))).unwrap();
    let mut rope = config.ropes[0].clone();
    rope.theta = 5e5;
    config.ropes.push(rope);
    attention_mut(&mut config.layers[1]).rope = None;
    attention_mut(&mut config.layers[2]).rope = Some(1);
    attention_mut(&mut config.layers[2]).window = Some(8);
    let graph = decoder_graph(&config, &source(&config)).unwrap();
    assert_ne!(graph.ropes[0], graph.ropes[1]);
    let angles_of = |layer: u32| {
        let nodes = graph.nodes.iter().filter(|node| node.layer == Some(layer));
        let rotations = nodes.filter(|node| matches!(node.op, Op::Rope { .. }));
        rotations.map(|node| graph.value(node.inputs[1]).name.as_str()).collect::<Vec<_>>()
    };
    assert_eq!([0, 1, 2].map(angles_of), [vec!["angles"; 2], vec![], vec!["angles1"; 2]]);
    let windows = graph.nodes.iter().filter_map(|node| match &node.op {
        Op::Attention(shape) => Some(shape.window),
        _ => None,
    });
    assert_eq!(windows.collect::<Vec<_>>(), [None, None, Some(8)]);
}

/// The graph contains one operation for each factor of the description, and none without a factor.
#[test]
fn factors_are_applied_where_the_description_has_them() {
    let mut config = read(&llama(&json!({ "num_hidden_layers": 2 }))).unwrap();
    let source = source(&config);
    let scales = |config: &ModelConfig| -> Vec<String> {
        let graph = decoder_graph(config, &source).unwrap();
        let scales = graph.nodes.iter().filter_map(|node| match node.op {
            Op::Scale(factor) => {
                Some(format!("{} = {factor} {}", graph.value(node.outputs[0]).name, graph.value(node.inputs[0]).name))
            }
            _ => None,
        });
        scales.collect()
    };
    assert_eq!(scales(&config), [""; 0]);
    (config.embedding_scale, config.logit_scale) = (Some(12.0), Some(0.125));
    config.layers[1].residual_scale = Some(0.25);
    attention_mut(&mut config.layers[0]).scale = 0.0625;
    let expected = [
        "x_scaled = 12 x",
        "attn_scaled.1 = 0.25 attn_out.1",
        "mlp_scaled.1 = 0.25 mlp_out.1",
        "final_scaled = 0.125 final",
    ];
    assert_eq!(scales(&config), expected);
    let graph = decoder_graph(&config, &source).unwrap();
    let attention = graph.nodes.iter().filter_map(|node| match &node.op {
        Op::Attention(shape) => Some(shape.scale),
        _ => None,
    });
    assert_eq!(attention.collect::<Vec<_>>(), [0.0625, 0.5]);
}

#[test]
fn parameters_are_counted_and_never_overflow() {
    let small = read(&llama(&json!({ "num_key_value_heads": 2, "tie_word_embeddings": true }))).unwrap();
    let sum = |config: &ModelConfig| -> u64 {
        let source = source(config);
        source.names().iter().map(|name| source.tensor(name).unwrap().elements() as u64).sum()
    };
    assert_eq!(small.parameters(), sum(&small));
    let untied = read(&llama(&json!({}))).unwrap();
    assert_eq!(untied.parameters(), sum(&untied));
    let mut huge = untied;
    (huge.hidden_size, huge.vocab_size) = (1 << 28, 1 << 28);
    let attention = attention_mut(&mut huge.layers[0]);
    (attention.heads, attention.kv_heads, attention.head_dim) = (1 << 28, 1 << 28, 1 << 16);
    assert_eq!(huge.parameters(), u64::MAX);
}

// --------------------------------------------------------------------------------------------------- tensors

/// A source in which one tensor is missing or has an additional row.
#[derive(Debug)]
struct Changed<'a> {
    source: &'a dyn WeightSource,
    name: String,
    shape: Option<Vec<usize>>,
}

impl WeightSource for Changed<'_> {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let view = self.source.tensor(name)?;
        match &self.shape {
            _ if name != self.name => Some(view),
            Some(shape) => Some(TensorView::new(view.dtype, shape, view.data)),
            None => None,
        }
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }
}

#[test]
fn missing_tensors_and_wrong_shapes_are_named() {
    for folder in conformance_models() {
        let source = SafetensorsFolder::open(&folder).unwrap();
        let config = read(&object(&folder.join("config.json"))).unwrap();
        let graph = decoder_graph(&config, &source).unwrap();
        for weight in &graph.weights {
            let name = weight.name.clone();
            let missing = Changed { source: &source, name: name.clone(), shape: None };
            assert_eq!(decoder_graph(&config, &missing).unwrap_err(), ModelError::MissingTensor { name: name.clone() });
            let mut taller = weight.shape.clone();
            taller[0] += 1;
            let [mut deeper, expected] = [weight.shape.clone(), weight.shape.clone()];
            deeper.push(1);
            for got in [taller, deeper, vec![]] {
                let other = Changed { source: &source, name: name.clone(), shape: Some(got.clone()) };
                let error = decoder_graph(&config, &other).unwrap_err();
                assert_eq!(error, ModelError::TensorShape { name: name.clone(), got, expected: expected.clone() });
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------ GGUF

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Encodes a metadata value; returns its type number and bytes.
fn value(value: &Value) -> (u32, Vec<u8>) {
    match value {
        Value::Number(n) if n.is_u64() => (4, (n.as_u64().unwrap() as u32).to_le_bytes().to_vec()),
        Value::Number(n) if n.is_i64() => (5, (n.as_i64().unwrap() as i32).to_le_bytes().to_vec()),
        Value::Number(n) => (6, (n.as_f64().unwrap() as f32).to_le_bytes().to_vec()),
        Value::Bool(b) => (7, vec![u8::from(*b)]),
        Value::String(text) => (8, string(text)),
        // An array of u32 with one element per layer.
        Value::Array(list) => {
            let words = list.iter().flat_map(|n| (n.as_u64().unwrap() as u32).to_le_bytes());
            (9, [&4u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes(), &words.collect::<Vec<u8>>()].concat())
        }
        other => panic!("{other}"),
    }
}

/// Encodes a file with metadata and zero tensors of the given types; dimensions are slowest first.
fn gguf_bytes(metadata: &Map<String, Value>, tensors: &[(String, Vec<u64>, u32)]) -> Vec<u8> {
    let mut head = b"GGUF".to_vec();
    head.extend(3u32.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((metadata.len() as u64).to_le_bytes());
    for (key, json) in metadata {
        let (ty, bytes) = value(json);
        head.extend([string(key), ty.to_le_bytes().to_vec(), bytes].concat());
    }
    let mut offset = 0u64;
    for (name, dims, ty) in tensors {
        head.extend(string(name));
        head.extend((dims.len() as u32).to_le_bytes());
        head.extend(dims.iter().rev().flat_map(|dim| dim.to_le_bytes()));
        head.extend(ty.to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += (dims.iter().product::<u64>() * 4).next_multiple_of(32);
    }
    head.resize(head.len().next_multiple_of(32) + offset as usize, 0);
    head
}

fn gguf(metadata: &Map<String, Value>, tensors: &[(String, Vec<u64>, u32)]) -> Gguf {
    Gguf::parse("tiny.gguf", gguf_bytes(metadata, tensors)).unwrap().with_conventions(gguf_conventions)
}

fn metadata(architecture: &str, changes: &Value) -> Map<String, Value> {
    let sizes = json!({
        "embedding_length": 16, "attention.head_count": 4, "attention.head_count_kv": 2, "block_count": 2,
        "feed_forward_length": 24, "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5,
    });
    let mut fields = sizes.as_object().unwrap().clone();
    for (key, value) in changes.as_object().unwrap() {
        if value.is_null() { drop(fields.remove(key)) } else { drop(fields.insert(key.clone(), value.clone())) }
    }
    let named = fields.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value));
    let mut all: Map<String, Value> = named.collect();
    all.insert("general.architecture".into(), json!(architecture));
    all
}

/// Returns all tensors of the model that [`metadata`] describes.
fn tensors() -> Vec<(String, Vec<u64>, u32)> {
    let mut tensors =
        vec![("token_embd.weight".to_owned(), vec![10, 16], 0), ("output_norm.weight".to_owned(), vec![16], 0)];
    for block in 0..2 {
        for (name, dims) in [
            ("attn_norm", vec![16]),
            ("attn_q", vec![16, 16]),
            ("attn_k", vec![8, 16]),
            ("attn_v", vec![8, 16]),
            ("attn_output", vec![16, 16]),
            ("ffn_norm", vec![16]),
            ("ffn_gate", vec![24, 16]),
            ("ffn_up", vec![24, 16]),
            ("ffn_down", vec![16, 24]),
        ] {
            tensors.push((format!("blk.{block}.{name}.weight"), dims, 0));
        }
    }
    tensors
}

fn with(extra: &[(&str, &[u64])]) -> Vec<(String, Vec<u64>, u32)> {
    let mut tensors = tensors();
    tensors.extend(extra.iter().map(|(name, dims)| ((*name).to_owned(), dims.to_vec(), 0)));
    tensors
}

fn read_gguf(architecture: &str, changes: &Value) -> Result<ModelConfig, ModelError> {
    config_from_gguf(&gguf(&metadata(architecture, changes), &tensors()))
}

#[test]
fn gguf_metadata_means_what_the_hub_config_means() {
    let file = gguf(&metadata("llama", &json!({ "rope.freq_base": 5e5 })), &tensors());
    let config = config_from_gguf(&file).unwrap();
    let hub = llama(&json!({
        "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 24, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "tie_word_embeddings": true,
    }));
    assert_eq!(config, read(&hub).unwrap());
    decoder_graph(&config, &file).unwrap();
}

#[test]
fn gguf_tensors_say_what_metadata_does_not() {
    let config =
        |extra: &[(&str, &[u64])]| config_from_gguf(&gguf(&metadata("qwen2", &json!({})), &with(extra))).unwrap();
    let layer = |extra: &[(&str, &[u64])]| config(extra).layers[1];
    let plain = layer(&[]);
    let GroupedQueryAttention { qkv_bias, output_bias, qk_norm, .. } = *attention(&plain);
    assert!(!qkv_bias && !output_bias && qk_norm.is_none() && !mlp(&plain).1);
    assert_eq!(config(&[]).head, OutputHead::Tied);
    assert_eq!(config(&[("output.weight", &[10, 16])]).head, OutputHead::Untied);
    assert!(attention(&layer(&[("blk.0.attn_q.bias", &[16])])).qkv_bias);
    assert!(attention(&layer(&[("blk.0.attn_output.bias", &[16])])).output_bias);
    assert!(mlp(&layer(&[("blk.0.ffn_gate.bias", &[24])])).1);
    assert!(attention(&layer(&[("blk.0.attn_q_norm.weight", &[4])])).qk_norm.is_some());
    assert_eq!(config(&[("rope_freqs.weight", &[2])]).ropes[0].divisors, Some(vec![0.0; 2]));
    // A tensor of an unsupported type must not be treated as absent.
    for name in
        ["token_embd.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"]
    {
        let mut tensors = with(&[]);
        tensors.retain(|(other, ..)| other != name);
        tensors.push((name.to_owned(), vec![1, 256], 16)); // IQ2_XXS
        let error = config_from_gguf(&gguf(&metadata("llama", &json!({})), &tensors)).unwrap_err();
        assert!(matches!(error, ModelError::UnusableTensor { .. }), "{name}: {error}");
    }
}

#[test]
fn gguf_tensors_are_required_by_name() {
    for (at, (name, ..)) in tensors().iter().enumerate() {
        let mut fewer = tensors();
        fewer.remove(at);
        let file = gguf(&metadata("llama", &json!({})), &fewer);
        let outcome = config_from_gguf(&file).and_then(|config| decoder_graph(&config, &file));
        let missing = outcome.unwrap_err();
        assert!(matches!(missing, ModelError::MissingTensor { .. }), "{name}: {missing}");
        let mut unreadable = tensors();
        (unreadable[at].1, unreadable[at].2) = (vec![1, 256], 16);
        let file = gguf(&metadata("llama", &json!({})), &unreadable);
        let error = config_from_gguf(&file).and_then(|config| decoder_graph(&config, &file)).unwrap_err();
        assert!(
            matches!(&error, ModelError::UnusableTensor { name, .. } if *name == named(&missing).0),
            "{name}: {error}"
        );
    }
}

#[test]
fn gguf_scalings_and_windows() {
    let rope = |changes: Value| read_gguf("qwen2", &changes).unwrap().ropes[0].scaling;
    assert_eq!(rope(json!({})), RopeScaling::Default);
    assert_eq!(rope(json!({ "rope.scaling.type": "none", "rope.scaling.factor": 4.0 })), RopeScaling::Default);
    assert_eq!(rope(json!({ "rope.scaling.factor": 0.0 })), RopeScaling::Default);
    for changes in [
        json!({ "rope.scaling.type": "linear", "rope.scaling.factor": 4.0 }),
        json!({ "rope.scaling.factor": 4.0 }),
        json!({ "rope.scale_linear": 4.0 }),
    ] {
        assert_eq!(rope(changes), RopeScaling::Linear { factor: 4.0 });
    }
    let yarn =
        json!({ "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16 });
    let RopeScaling::Yarn { factor, original_max_position_embeddings, .. } = rope(yarn) else {
        panic!("the scaling is not YaRN")
    };
    assert_eq!((factor, original_max_position_embeddings), (4.0, 16));
    let windows =
        |window: u32| windows_of(&read_gguf("mistral", &json!({ "attention.sliding_window": window })).unwrap());
    assert_eq!((windows(0), windows(8)), (vec![None; 2], vec![Some(8); 2]));
}

/// Granite's factors have the same meaning in both formats; in a GGUF file, 0 means that the factor is absent.
#[test]
fn granite_has_its_factors_from_both_forms() {
    let factors = |config: &ModelConfig| {
        let layer = &config.layers[0];
        (config.embedding_scale, layer.residual_scale, config.logit_scale, attention(layer).scale)
    };
    let hub = |changes: Value| {
        let mut config = llama(&json!({ "model_type": "granite" }));
        config.extend(changes.as_object().unwrap().clone());
        read(&config)
    };
    let gguf = |changes: Value| read_gguf("granite", &changes);
    let given = (Some(12.0), Some(0.22), Some(0.125), 0.0625);
    let in_hub = json!({
        "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 0.0625,
    });
    assert_eq!(factors(&hub(in_hub).unwrap()), given);
    let in_gguf =
        json!({ "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.0625 });
    assert_eq!(factors(&gguf(in_gguf).unwrap()), given);
    // The defaults of the hub's class, and those of a GGUF file: the scale of the scores depends on the head size.
    let ones = json!({ "embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0 });
    for config in [hub(json!({})), hub(json!({ "attention_multiplier": null })), hub(ones)] {
        assert_eq!(factors(&config.unwrap()), (None, None, None, 1.0));
    }
    let zeros = json!({ "embedding_scale": 0.0, "residual_scale": 0.0, "logit_scale": 0.0, "attention.scale": 0.0 });
    for config in [gguf(json!({})), gguf(zeros)] {
        assert_eq!(factors(&config.unwrap()), (None, None, None, 0.5));
    }
    for field in ["embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"] {
        for value in [json!(0), json!(-1.0), json!(1e300), json!("1"), json!(true)] {
            assert_eq!(named(&hub(json!({ field: value })).unwrap_err()).0, field);
        }
    }
    for key in ["embedding_scale", "residual_scale", "logit_scale", "attention.scale"] {
        assert_eq!(named(&gguf(json!({ key: -1.0 })).unwrap_err()).0, format!("granite.{key}"));
    }
    // Factors that Granite does not have are rejected as in any other family.
    let error = gguf(json!({ "final_logit_softcapping": 30.0 })).unwrap_err();
    assert_eq!(named(&error).0, "granite.final_logit_softcapping");
}

#[test]
fn gguf_values_that_cannot_be_are_refused_by_key() {
    for (changes, key) in [
        (json!({ "embedding_length": null }), "embedding_length"),
        (json!({ "attention.head_count": null }), "attention.head_count"),
        (json!({ "block_count": null }), "block_count"),
        (json!({ "feed_forward_length": null }), "feed_forward_length"),
        (json!({ "context_length": null }), "context_length"),
        (json!({ "attention.layer_norm_rms_epsilon": null }), "attention.layer_norm_rms_epsilon"),
        (json!({ "embedding_length": 0 }), "embedding_length"),
        (json!({ "attention.head_count": 0 }), "attention.head_count"),
        (json!({ "attention.head_count_kv": 0 }), "attention.head_count_kv"),
        (json!({ "attention.head_count_kv": 3 }), "attention.head_count_kv"),
        (json!({ "block_count": 0 }), "block_count"),
        (json!({ "block_count": u32::MAX }), "block_count"),
        (json!({ "feed_forward_length": u32::MAX }), "feed_forward_length"),
        (json!({ "context_length": 0 }), "context_length"),
        (json!({ "embedding_length": -16 }), "embedding_length"),
        (json!({ "embedding_length": "16" }), "embedding_length"),
        (json!({ "embedding_length": 16.5 }), "embedding_length"),
        (json!({ "attention.head_count": [4, 4] }), "attention.head_count"),
        (json!({ "attention.head_count_kv": [2, 1] }), "attention.head_count_kv"),
        (json!({ "attention.key_length": 5, "attention.value_length": 5 }), "rope.dimension_count"),
        (json!({ "attention.key_length": 0 }), "attention.key_length"),
        (json!({ "attention.value_length": 8 }), "attention.value_length"),
        (json!({ "rope.dimension_count": 3 }), "rope.dimension_count"),
        (json!({ "rope.dimension_count": 64 }), "rope.dimension_count"),
        (json!({ "rope.freq_base": "10000" }), "rope.freq_base"),
        (json!({ "rope.freq_base": 10_000 }), "rope.freq_base"),
        (json!({ "rope.freq_base": -1.0 }), "rope.freq_base"),
        (json!({ "attention.layer_norm_rms_epsilon": -1.0 }), "attention.layer_norm_rms_epsilon"),
        (json!({ "attention.layer_norm_rms_epsilon": true }), "attention.layer_norm_rms_epsilon"),
        (json!({ "rope.scaling.type": 1 }), "rope.scaling.type"),
        (json!({ "rope.scaling.type": "longrope" }), "rope.scaling.type"),
        (json!({ "rope.scaling.type": "linear" }), "rope.scaling.factor"),
        (json!({ "rope.scaling.type": "yarn", "rope.scaling.factor": 0.5 }), "rope.scaling.factor"),
        (json!({ "rope.scaling.factor": 0.5 }), "rope.scaling.factor"),
        (json!({ "rope.scaling.factor": "2" }), "rope.scaling.factor"),
        (json!({ "rope.scaling.attn_factor": 1.5 }), "rope.scaling.attn_factor"),
        (json!({ "attention.scale": 0.2 }), "attention.scale"),
        (json!({ "logit_scale": 2.0 }), "logit_scale"),
        (json!({ "expert_count": 8 }), "expert_count"),
        (json!({ "attention.sliding_window": -1 }), "attention.sliding_window"),
    ] {
        for architecture in ["llama", "qwen3"] {
            let error = read_gguf(architecture, &changes).expect_err(&format!("{architecture} {changes}"));
            assert_eq!(named(&error).0, format!("{architecture}.{key}"), "{changes}: {error}");
        }
    }
    for key in ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon", "llama.rope.scaling.factor"] {
        for float in [f32::NAN, f32::INFINITY] {
            let error = config_from_gguf(&with_float(key, float)).unwrap_err();
            assert_eq!(named(&error).0, key, "{float}: {error}");
        }
    }
}

/// The tiny file with one float that JSON cannot represent.
fn with_float(key: &str, float: f32) -> Gguf {
    let marker = 1.234_567_9f32;
    let mut fields = metadata("llama", &json!({}));
    fields.insert(key.into(), json!(marker));
    let mut bytes = gguf_bytes(&fields, &tensors());
    let at = bytes.windows(4).position(|window| window == marker.to_le_bytes()).unwrap();
    bytes[at..at + 4].copy_from_slice(&float.to_le_bytes());
    Gguf::parse("float.gguf", bytes).unwrap().with_conventions(gguf_conventions)
}

#[test]
fn gguf_architectures_are_refused_by_name() {
    for name in ["gemma3", "phi3", "qwen2moe", "deepseek2", "LLAMA", ""] {
        let error = read_gguf(name, &json!({})).unwrap_err();
        assert_eq!(error, ModelError::UnsupportedArchitecture { name: name.into() });
    }
    let mut unnamed = metadata("llama", &json!({}));
    unnamed.remove("general.architecture");
    let error = config_from_gguf(&gguf(&unnamed, &tensors())).unwrap_err();
    assert_eq!(error, ModelError::MissingField { field: "general.architecture".into() });
}
