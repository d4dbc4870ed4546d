//! The `generation` tag, which marks what the assistant said for training.
//!
//! It changes nothing in the text. The template engine has no tags of one's own, so the tag becomes a `with` block: like
//! the tag it has a scope of its own. Lines keep their numbers.

/// The template with `{% generation %}` and `{% endgeneration %}` replaced.
pub(super) fn as_plain_block(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        text.push_str(before);
        rest = tag;
        let inside = tag.trim_start_matches(['-', '+']).trim_start();
        let lead = &tag[..tag.len() - inside.len()];
        for (name, block) in [("generation", "with"), ("endgeneration", "endwith")] {
            if let Some(after) = inside.strip_prefix(name)
                && after.trim_start().trim_start_matches(['-', '+']).starts_with("%}")
            {
                text.push_str(lead);
                text.push_str(block);
                rest = after;
            }
        }
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::as_plain_block;

    #[test]
    fn only_the_tag_is_replaced() {
        assert_eq!(
            as_plain_block("a{%- generation -%}\n b {%endgeneration%}c{{ generation }}"),
            "a{%- with -%}\n b {%endwith%}c{{ generation }}"
        );
        for other in ["{% if generation %}x{% endif %}", "{% set generation = 1 %}", "{% generations %}", "{%", "é{% "]
        {
            assert_eq!(as_plain_block(other), other);
        }
    }
}
