//! Tests that streamed text consists of complete characters, each sent with its last byte, and that sent text never
//! changes.

use ascend_llm::text::{Detokenizer, Vocabulary};
use proptest::prelude::*;
use serde_json::Value;

/// Vocabulary of bytes: id `b` is the byte `b`, id 256 is a control token, id 257 is " word".
#[derive(Debug)]
struct Bytes;

impl Vocabulary for Bytes {
    fn len(&self) -> usize {
        258
    }
    fn token_bytes(&self, id: u32, first: bool, out: &mut Vec<u8>) {
        match u8::try_from(id) {
            Ok(byte) => out.push(byte),
            Err(_) if id == 256 => out.extend_from_slice(b"<end>"),
            Err(_) if id == 257 => out.extend_from_slice(if first { b"word" } else { b" word" }),
            Err(_) => {}
        }
    }
    fn encode(&self, text: &str, _add_special: bool) -> Result<Vec<u32>, String> {
        Ok(text.bytes().map(u32::from).collect())
    }
    fn is_special(&self, id: u32) -> bool {
        id == 256
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn golden_streams_come_out_piece_by_piece() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/cases/utf8_stream.json");
    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = file["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let mut detokenizer = Detokenizer::new(true);
        let mut full = String::new();
        let deltas = case["deltas"].as_array().unwrap();
        for (piece, expected) in case["pieces_hex"].as_array().unwrap().iter().zip(deltas) {
            let mut delta = String::new();
            detokenizer.push_bytes(&unhex(piece.as_str().unwrap()), &mut delta);
            assert_eq!(delta, expected.as_str().unwrap(), "{}", case["id"]);
            full.push_str(&delta);
        }
        let mut rest = String::new();
        detokenizer.flush(&mut rest);
        assert_eq!(rest, case["flush_at_end"].as_str().unwrap(), "{}", case["id"]);
        assert_eq!(full + &rest, case["full"].as_str().unwrap(), "{}", case["id"]);
    }
}

#[test]
fn control_tokens_are_left_out_without_breaking_a_character() {
    for (skip, expected) in [(true, "é"), (false, "\u{fffd}<end>\u{fffd}")] {
        let (mut detokenizer, mut text) = (Detokenizer::new(skip), String::new());
        for id in [0xC3, 256, 0xA9] {
            detokenizer.push(&Bytes, id, &mut text);
        }
        detokenizer.flush(&mut text);
        assert_eq!(text, expected);
    }
}

#[test]
fn only_the_first_token_of_a_text_may_lose_its_space() {
    let text_of = |mut detokenizer: Detokenizer, ids: &[u32]| {
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(&Bytes, id, &mut text);
        }
        text
    };
    assert_eq!(text_of(Detokenizer::new(true), &[256, 257, 257]), "word word");
    assert_eq!(text_of(Detokenizer::new(false), &[256, 257]), "<end> word");
    assert_eq!(text_of(Detokenizer::continuing(true), &[257, 257]), " word word");
}

/// Byte strings that are nearly UTF-8: fragments of real characters, split anywhere, with stray bytes between them.
fn ragged_bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        "[aé鬱🚀\u{fffd}]{1,2}".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 1..3),
        prop::sample::select(vec![vec![0xF0, 0x9F], vec![0xE9, 0xAC], vec![0xED, 0xA0, 0x80], vec![0xC0, 0x80]]),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_split_of_any_bytes_gives_the_lossy_text(
        bytes in ragged_bytes(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
    ) {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let (mut detokenizer, mut text) = (Detokenizer::new(true), String::new());
        for pair in cuts.windows(2) {
            detokenizer.push_bytes(&bytes[pair[0]..pair[1]], &mut text);
            prop_assert!(detokenizer.held_bytes() <= 3);
            // The detokenizer holds back only the start of an incomplete character.
            let sent = &bytes[..pair[1] - detokenizer.held_bytes()];
            prop_assert_eq!(&text, &String::from_utf8_lossy(sent));
            let held = &bytes[pair[1] - detokenizer.held_bytes()..pair[1]];
            prop_assert!(std::str::from_utf8(held).map_or_else(|error| error.error_len().is_none(), str::is_empty));
        }
        detokenizer.flush(&mut text);
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
    }
}
