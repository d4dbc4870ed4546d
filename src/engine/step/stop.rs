//! Stop strings in streamed text, and the default set of ids that end a sequence.
//!
//! [`StopChecker`] holds back only text that may still grow into a stop string: the longest suffix of the text so far
//! that is a proper prefix of a stop string. It truncates the text at the earliest position at which a stop string is
//! complete. If several are complete at the same position, the one that began first wins. The result therefore does not
//! depend on how the text is split into pieces. The checker receives only generated text, never the prompt, and does
//! not depend on tokens.
//!
//! ```text
//! text so far      .................. <EN
//!                  published         held      state = length of the held suffix, as a node of the trie
//! ```

use crate::num::to_u32;

/// Node of the trie of all stop strings; node 0 is the root (nothing matched).
#[derive(Clone, Debug, Default)]
struct Node {
    /// Next bytes, each with the node that it leads to.
    children: Vec<(u8, u32)>,
    /// Node of the longest proper suffix that is also in the trie.
    fallback: u32,
    /// Number of bytes from the root.
    depth_bytes: usize,
    /// Index of the stop string that ends here.
    ///
    /// This is the node's own stop string, or the longest one that is a proper suffix of the node's text.
    ends: Option<u32>,
}

/// Truncates streamed text at stop strings.
#[derive(Clone, Debug)]
pub struct StopChecker {
    nodes: Vec<Node>,
    lens_bytes: Vec<usize>,
    include: bool,
    state: u32,
    held: String,
    matched: Option<usize>,
}

impl StopChecker {
    /// Creates a checker for stop strings; with `include`, the matched stop string is part of the output.
    ///
    /// An empty string never matches; the validation of the parameters rejects it earlier.
    pub fn new(stops: &[String], include: bool) -> Self {
        let mut nodes = vec![Node::default()];
        for (index, stop) in stops.iter().enumerate() {
            let mut at = 0;
            for &byte in stop.as_bytes() {
                if let Some(next) = child(&nodes, at, byte) {
                    at = next;
                    continue;
                }
                let next = to_u32(nodes.len());
                let depth_bytes = nodes[at as usize].depth_bytes + 1;
                nodes.push(Node { depth_bytes, ..Node::default() });
                nodes[at as usize].children.push((byte, next));
                at = next;
            }
            if at != 0 && nodes[at as usize].ends.is_none() {
                nodes[at as usize].ends = Some(to_u32(index));
            }
        }
        link_fallbacks(&mut nodes);
        let lens_bytes: Vec<usize> = stops.iter().map(String::len).collect();
        let longest = lens_bytes.iter().copied().max().unwrap_or(0);
        // Capacity for the held text and the text of an ordinary token, so that steady decoding allocates no memory.
        let held = String::with_capacity(longest + 256);
        Self { nodes, lens_bytes, include, state: 0, held, matched: None }
    }

    /// Adds the next piece of text, and appends to `out` the text that may be published.
    ///
    /// Returns the index of the matched stop string. After a match, the checker publishes no further text.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.matched.is_some() {
            return self.matched;
        }
        if self.nodes.len() == 1 {
            out.push_str(text);
            return None;
        }
        let held_before = self.held.len();
        self.held.push_str(text);
        for (offset, &byte) in text.as_bytes().iter().enumerate() {
            self.state = step(&self.nodes, self.state, byte);
            if let Some(stop) = self.nodes[self.state as usize].ends {
                let stop = stop as usize;
                let end = held_before + offset + 1;
                let kept = if self.include { end } else { end - self.lens_bytes[stop] };
                out.push_str(&self.held[..kept]);
                self.held.clear();
                self.matched = Some(stop);
                return self.matched;
            }
        }
        let sendable = self.held.len() - self.nodes[self.state as usize].depth_bytes;
        out.push_str(&self.held[..sendable]);
        self.held.drain(..sendable);
        None
    }

    /// Adds text in which no stop string may match (before `min_tokens`).
    ///
    /// It appends the held text and this text to `out`, and starts anew after them.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        if self.matched.is_none() {
            self.flush(out);
            out.push_str(text);
        }
    }

    /// Appends the held text to `out`: the sequence has ended, so that no stop string can complete.
    pub fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.state = 0;
    }

    /// Returns the index of the matched stop string.
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }

    /// Returns the number of characters that are held back now.
    pub fn held_chars(&self) -> usize {
        self.held.chars().count()
    }
}

/// Returns the ids that end a sequence unless the request ignores them, sorted and without duplicates.
///
/// These are the ids of the generation config, or those of the model's config if the generation config has none, and in
/// each case the tokenizer's own ids.
pub fn default_stop_ids(generation: &[u32], config: &[u32], tokenizer: &[u32]) -> Vec<u32> {
    let named = if generation.is_empty() { config } else { generation };
    let mut ids: Vec<u32> = named.iter().chain(tokenizer).copied().collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn child(nodes: &[Node], at: u32, byte: u8) -> Option<u32> {
    nodes[at as usize].children.iter().find(|(edge, _)| *edge == byte).map(|(_, next)| *next)
}

/// Returns the node of the longest suffix of (the node's text + `byte`) that is in the trie.
fn step(nodes: &[Node], mut at: u32, byte: u8) -> u32 {
    loop {
        match child(nodes, at, byte) {
            Some(next) => return next,
            None if at == 0 => return 0,
            None => at = nodes[at as usize].fallback,
        }
    }
}

/// Sets `fallback` and inherits `ends`, breadth first, since a node's fallback is less deep than the node.
fn link_fallbacks(nodes: &mut [Node]) {
    let mut queue = std::collections::VecDeque::from([0_u32]);
    while let Some(at) = queue.pop_front() {
        for (byte, next) in nodes[at as usize].children.clone() {
            let fallback = if at == 0 { 0 } else { step(nodes, nodes[at as usize].fallback, byte) };
            let inherited = nodes[fallback as usize].ends;
            let node = &mut nodes[next as usize];
            node.fallback = fallback;
            node.ends = node.ends.or(inherited);
            queue.push_back(next);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn cases(file: &str) -> Value {
        let path = format!("{}/tests/data/cases/{file}", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn strings(value: &Value) -> Vec<String> {
        serde_json::from_value(value.clone()).unwrap()
    }

    fn run(stops: &[String], include: bool, pieces: &[&str]) -> (String, Option<usize>) {
        let mut checker = StopChecker::new(stops, include);
        let mut sent = String::new();
        for piece in pieces {
            if checker.push(piece, &mut sent).is_some() {
                break;
            }
        }
        checker.flush(&mut sent);
        (sent, checker.matched())
    }

    /// Reference implementation: checks every end position and every stop string at each.
    fn truncate_naively(text: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
        for end in 1..=text.len() {
            let ending = stops
                .iter()
                .enumerate()
                .filter(|(_, stop)| !stop.is_empty() && text.as_bytes()[..end].ends_with(stop.as_bytes()))
                .max_by_key(|(index, stop)| (stop.len(), std::cmp::Reverse(*index)));
            if let Some((index, stop)) = ending {
                let kept = if include { end } else { end - stop.len() };
                return (text[..kept].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn golden_cases_send_exactly_the_expected_text() {
        let file = cases("stop_strings.json");
        let all = file["cases"].as_array().unwrap().iter().chain(file["prompt_cases"].as_array().unwrap());
        let mut seen = 0;
        for case in all {
            let (id, stops, pieces) = (&case["id"], strings(&case["stop"]), strings(&case["pieces"]));
            let limit = case["max_tokens"].as_u64().map_or(pieces.len(), |limit| usize::try_from(limit).unwrap());
            let held: Option<Vec<usize>> =
                case.get("max_chars_held_after_each_piece").map(|value| serde_json::from_value(value.clone()).unwrap());
            let mut checker = StopChecker::new(&stops, case["include"].as_bool().unwrap_or(false));
            let (mut sent, mut used) = (String::new(), 0_u64);
            let expected = case["expect"]["text"].as_str().unwrap();
            for (index, piece) in pieces.iter().take(limit).enumerate() {
                used += 1;
                let matched = checker.push(piece, &mut sent);
                assert!(expected.starts_with(&sent), "{id}: sent {sent:?} beyond {expected:?}");
                if let Some(held) = &held {
                    assert!(checker.held_chars() <= held[index], "{id}: held {} at {index}", checker.held_chars());
                }
                if matched.is_some() {
                    break;
                }
            }
            checker.flush(&mut sent);
            assert_eq!(sent, expected, "{id}");
            let expected_stop = case["expect"]["matched_stop"].as_str();
            assert_eq!(checker.matched().map(|index| stops[index].as_str()), expected_stop, "{id}");
            if let Some(count) = case["expect"]["completion_tokens"].as_u64() {
                assert_eq!(used, count, "{id}: tokens used");
            }
            seen += 1;
        }
        assert_eq!(seen, 10);
    }

    #[test]
    fn an_empty_stop_never_matches() {
        let limits = cases("stop_strings.json")["limits"].clone();
        let stops = strings(&limits[0]["stop"]);
        assert_eq!(run(&stops, false, &["any", " text"]), ("any text".to_owned(), None));
    }

    #[test]
    fn a_stop_is_matched_as_text_in_any_token() {
        for piece in ["T", " T", "CAT", "\u{a0}T", "日T"] {
            let (sent, matched) = run(&["T".to_owned()], false, &["x", piece, "y"]);
            assert_eq!(sent, format!("x{}", &piece[..piece.len() - 1]));
            assert_eq!(matched, Some(0));
        }
    }

    #[test]
    fn a_long_stop_does_not_delay_ordinary_text() {
        let mut checker = StopChecker::new(&["#".repeat(400)], false);
        let mut sent = String::new();
        for piece in ["ordinary", " text", " flows"] {
            checker.push(piece, &mut sent);
            assert_eq!(checker.held_chars(), 0);
        }
        assert_eq!(sent, "ordinary text flows");
    }

    #[test]
    fn text_before_min_tokens_is_sent_and_forgotten() {
        let mut checker = StopChecker::new(&["stop".to_owned()], false);
        let mut sent = String::new();
        checker.push("a st", &mut sent);
        checker.pass("op b", &mut sent);
        assert_eq!(checker.push(" st", &mut sent), None);
        assert_eq!(checker.push("op c", &mut sent), Some(0));
        assert_eq!(sent, "a stop b ");
        checker.pass("late", &mut sent);
        checker.flush(&mut sent);
        assert_eq!(sent, "a stop b ");
    }

    #[test]
    fn default_stop_ids_follow_the_generation_config_first() {
        let list = |value: &Value| -> Vec<u32> {
            match value {
                Value::Array(ids) => ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect(),
                Value::Number(id) => vec![u32::try_from(id.as_u64().unwrap()).unwrap()],
                _ => Vec::new(),
            }
        };
        let mut seen = 0;
        for case in cases("eos.json")["cases"].as_array().unwrap() {
            if case.get("request").is_some() {
                continue;
            }
            let ids = default_stop_ids(
                &list(&case["gen"]["eos_token_id"]),
                &list(&case["cfg"]["eos_token_id"]),
                &list(&case["tok"]),
            );
            assert_eq!(ids, list(&case["expect_stop_ids"]), "{}", case["id"]);
            seen += 1;
        }
        assert_eq!(seen, 4);
    }

    proptest! {
        #[test]
        fn any_split_truncates_the_text_at_the_earliest_stop(
            text in "[ab鬱<]{0,24}",
            stops in prop::collection::vec("[ab鬱<]{1,4}", 0..4),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            include: bool,
        ) {
            let bounds: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| bounds[cut.index(bounds.len())]).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(run(&stops, include, &pieces), truncate_naively(&text, &stops, include));
        }

        #[test]
        fn held_text_is_the_longest_suffix_that_may_grow_into_a_stop(
            text in "[ab鬱]{0,16}",
            stops in prop::collection::vec("[ab鬱]{1,5}", 1..4),
        ) {
            let mut checker = StopChecker::new(&stops, false);
            let mut sent = String::new();
            if checker.push(&text, &mut sent).is_none() {
                let held = text
                    .char_indices()
                    .map(|(at, _)| &text[at..])
                    .find(|suffix| stops.iter().any(|stop| stop.starts_with(suffix)))
                    .unwrap_or("");
                prop_assert_eq!(checker.held_chars(), held.chars().count());
                prop_assert_eq!(format!("{sent}{held}"), text);
            }
        }
    }
}
