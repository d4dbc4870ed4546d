//! Version of the library, and the commit from which it was built.

#![forbid(unsafe_code)]

/// Version of the crate.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// First 12 digits of the commit, with `-dirty` if files differed from it; `None` if the build script found no commit.
pub(crate) const COMMIT: Option<&str> = match option_env!("ASCEND_LLM_COMMIT") {
    Some(commit) if !commit.is_empty() => Some(commit),
    _ => None,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_a_number_in_hexadecimal() {
        assert!(VERSION.split('.').count() >= 3);
        if let Some(commit) = COMMIT {
            let digits = commit.strip_suffix("-dirty").unwrap_or(commit);
            assert!(digits.len() >= 12 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()), "{commit}");
        }
    }
}
