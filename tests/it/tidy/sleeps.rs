//! A test waits for a state. Where it is about time, it says why time must pass.

use super::{read, root, rust_files, without_comments_and_literals, words};

/// The only file that sleeps: `time_passes` and the waits for a state.
const SLEEPS: &str = "support/wait.rs";

/// Ways to let time pass.
const FORBIDDEN: &[&str] = &["sleep", "sleep_until", "park_timeout", "interval"];

#[test]
fn no_test_sleeps_without_saying_why() {
    let (mut seen, mut sleepers) = (0, Vec::new());
    for path in rust_files(&root().join("tests/it")) {
        let code = without_comments_and_literals(&read(&path));
        let sleeps = words(&code).any(|word| FORBIDDEN.contains(&word));
        if path.ends_with(SLEEPS) {
            assert!(sleeps, "the check does not see what it forbids");
            seen += 1;
        } else if sleeps {
            sleepers.push(path.display().to_string());
        }
    }
    assert_eq!(seen, 1, "{SLEEPS} was not seen");
    assert!(
        sleepers.is_empty(),
        "these sleep; wait for a state with `eventually`, or call `time_passes` with the reason:\n{}",
        sleepers.join("\n")
    );
}
