//! Client address detection alone: nanoseconds and allocations. `cargo bench --bench address`.
//!
//! Each figure is the median of interleaved rounds (every case once per round), so that a slow
//! moment of the machine affects all cases alike. A thousand networks are trusted. Every request
//! comes from another client through other proxies, so no search repeats. An allocation on a
//! measured path ends the run with an error.

mod counting;

use std::{
    hint::black_box,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Instant,
};

use http::{HeaderMap, HeaderName, HeaderValue};
use ipnet::IpNet;
use tidegate::identity::{AddressSource, Identifier, IdentitySettings};

const ROUNDS: usize = 21;
const REQUESTS: u32 = 4_096;
const NETWORKS: u32 = 1_000;

fn main() {
    // cargo test also builds this, and starts it without that argument
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let cases = cases();
    let mut ns: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (case, ns) in cases.iter().zip(&mut ns) {
            ns.push(case.round());
        }
    }
    println!("{:<60} {:>8}", "address, 1,000 trusted networks", "ns");
    for (case, ns) in cases.iter().zip(&mut ns) {
        ns.sort_by(f64::total_cmp);
        println!("{:<60} {:>8.1}", case.name, ns[ns.len() / 2]);
    }
    println!("allocations per address: 0 (counted)");
    println!(
        "memory: {} bytes for 1,000 networks of each family",
        cases[0].bytes
    );
}

struct Case {
    name: &'static str,
    identifier: Identifier,
    requests: Vec<(IpAddr, HeaderMap)>,
    /// Bytes that the identifier occupies.
    bytes: usize,
}

impl Case {
    fn new(
        name: &'static str,
        source: AddressSource,
        request: impl Fn(u32) -> (IpAddr, HeaderMap),
    ) -> Case {
        let settings = IdentitySettings {
            trusted_proxies: (0..NETWORKS).flat_map(networks).collect(),
            address_from: source,
            ..IdentitySettings::default()
        };
        let before = counting::held();
        let identifier = Identifier::new(&settings);
        let bytes = counting::held() - before;
        Case {
            name,
            identifier,
            bytes,
            requests: (0..REQUESTS).map(request).collect(),
        }
    }

    /// Nanoseconds per request.
    fn round(&self) -> f64 {
        let before = counting::allocations();
        let begin = Instant::now();
        for (peer, headers) in &self.requests {
            black_box(self.identifier.locate(*peer, headers, |_| ()));
        }
        let elapsed = begin.elapsed();
        assert_eq!(counting::allocations(), before, "{}", self.name);
        elapsed.as_nanos() as f64 / f64::from(REQUESTS)
    }
}

/// The nth trusted network of each family; no two are adjacent.
fn networks(n: u32) -> [IpNet; 2] {
    let v4 = Ipv4Addr::from_bits(10 << 24 | n << 9);
    let v6 = Ipv6Addr::from_bits(0xfd << 120 | u128::from(n) << 65);
    [
        IpNet::new(v4.into(), 24).expect("a prefix"),
        IpNet::new(v6.into(), 64).expect("a prefix"),
    ]
}

/// A distinct proxy in one of the networks for each number.
fn proxy(n: u32) -> Ipv4Addr {
    let mixed = n.wrapping_mul(0x9e37_79b9);
    Ipv4Addr::from_bits(10 << 24 | (mixed % NETWORKS) << 9 | mixed >> 24)
}

/// A distinct untrusted client for each number.
fn client(n: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(198 << 24 | n.wrapping_mul(0x9e37_79b9) >> 8)
}

fn header(name: HeaderName, value: String) -> HeaderMap {
    HeaderMap::from_iter([(name, HeaderValue::try_from(value).expect("a value"))])
}

fn cases() -> Vec<Case> {
    let listed = || HeaderName::from_static("x-forwarded-for");
    let one = || HeaderName::from_static("cf-connecting-ip");
    vec![
        Case::new(
            "an untrusted peer with any header",
            AddressSource::XForwardedFor,
            |n| {
                (
                    client(n).into(),
                    header(listed(), format!("{}, {}", client(n + 1), proxy(n))),
                )
            },
        ),
        Case::new(
            "x-forwarded-for: client",
            AddressSource::XForwardedFor,
            |n| (proxy(n).into(), header(listed(), client(n).to_string())),
        ),
        Case::new(
            "x-forwarded-for: forged, client, proxy",
            AddressSource::XForwardedFor,
            |n| {
                let value = format!("6.6.6.6, {}, {}", client(n), proxy(n + 1));
                (proxy(n).into(), header(listed(), value))
            },
        ),
        Case::new(
            "x-forwarded-for: IPv6 client, IPv6 proxy",
            AddressSource::XForwardedFor,
            |n| {
                let inner = Ipv6Addr::from_bits(0xfd << 120 | u128::from(n % NETWORKS) << 65 | 7);
                let client =
                    Ipv6Addr::from_bits(0x2001_0db8 << 96 | u128::from(n) << 64 | 0xabcd_ef01);
                (inner.into(), header(listed(), format!("{client}, {inner}")))
            },
        ),
        Case::new("forwarded: client, proxy", AddressSource::Forwarded, |n| {
            let value = format!("for={};proto=https, for=\"{}:80\"", client(n), proxy(n + 1));
            (proxy(n).into(), header(http::header::FORWARDED, value))
        }),
        Case::new(
            "cf-connecting-ip: client",
            AddressSource::Single(one()),
            |n| (proxy(n).into(), header(one(), client(n).to_string())),
        ),
    ]
}
