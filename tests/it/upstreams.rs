//! Upstreams with several servers: load balancing, and failures of a server.

mod balance;
mod chaos;
mod failing;
mod health;
mod reaching;

use crate::support::{Gateway, Origin, wait::eventually_eq};

/// An upstream `origin` with these servers and additional keys.
fn upstream(origins: &[&Origin], keys: &str) -> String {
    let urls: Vec<String> = origins.iter().map(|origin| origin.url()).collect();
    format!("[server]\nworkers = 1\n[upstream.origin]\nservers = {urls:?}\n{keys}\n")
}

/// Number of requests that each server received.
fn shares(origins: &[&Origin]) -> Vec<usize> {
    origins
        .iter()
        .map(|origin| origin.requests().len())
        .collect()
}

/// Waits until the log contains `text` this many times.
fn logged(gateway: &Gateway, text: &str, times: usize) {
    eventually_eq(text, times, || gateway.stderr().matches(text).count());
}
