//! Several servers behind one name: who gets a request, and what becomes of it when a server fails.

mod balance;
mod failing;

use crate::support::Origin;

/// An upstream `origin` with these servers, and more of its keys.
fn upstream(origins: &[&Origin], keys: &str) -> String {
    let urls: Vec<String> = origins.iter().map(|origin| origin.url()).collect();
    format!("[server]\nworkers = 1\n[upstream.origin]\nservers = {urls:?}\n{keys}\n")
}

/// How many requests each has seen.
fn shares(origins: &[&Origin]) -> Vec<usize> {
    origins
        .iter()
        .map(|origin| origin.requests().len())
        .collect()
}
