//! Replays the fuzzing corpora through their checks on each test run.

use std::{fs, path::Path};

#[path = "../../fuzz/checks/address.rs"]
mod address;
#[path = "../../fuzz/checks/body.rs"]
mod body;
#[path = "../../fuzz/checks/configuration.rs"]
mod configuration;
#[path = "../../fuzz/checks/path.rs"]
mod path;
#[path = "../../fuzz/checks/response.rs"]
mod response;
#[path = "../../fuzz/checks/token.rs"]
mod token;
#[path = "../../fuzz/checks/usage.rs"]
mod usage;

/// Runs the check on every file of a corpus.
fn replay(corpus: &str, check: fn(&[u8])) {
    let folder = Path::new("fuzz/corpus").join(corpus);
    let files =
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut seen = 0;
    for file in files {
        let path = file.expect("it can be listed").path();
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        // on a failure, the last line names the file
        println!("{}", path.display());
        check(&bytes);
        seen += 1;
    }
    assert!(seen > 10, "only {seen} files in {}", folder.display());
}

#[test]
fn the_corpus_of_tokens_breaks_nothing() {
    replay("token", token::check);
}

#[test]
fn the_corpora_of_addresses_and_proxy_headers_break_nothing() {
    replay("x_forwarded_for", address::x_forwarded_for);
    replay("forwarded", address::forwarded);
    replay("proxy_v1", address::proxy_v1);
    replay("proxy_v2", address::proxy_v2);
}

#[test]
fn the_corpora_of_paths_and_of_answers_break_nothing() {
    replay("path", path::check);
    replay("response", response::check);
}

#[test]
fn the_corpora_of_configurations_and_rates_break_nothing() {
    replay("configuration", configuration::text);
    replay("rate", configuration::rate);
}

#[test]
fn the_corpus_of_bodies_breaks_nothing() {
    replay("body", body::check);
}

#[test]
fn the_corpus_of_usage_breaks_nothing() {
    replay("usage", usage::check);
}
