//! A refusal changes nothing: two equal runs, one with refused requests in between, see the same
//! verdicts and remainders.

use super::plan::ALGORITHMS;
use crate::support::{Client, Gateway, Redis, Request, random::Random};

/// The capacity, and the cost of the refused requests.
const CAPACITY: u64 = 40;

/// A period of a day, so that nothing refills during a run.
fn limits(scope: &str) -> String {
    let mut toml = String::from(
        "[limit.shut]\nkey = [\"header:x-key\"]\nalgorithm = \"fixed_window\"\nrate = \"1/d\"\n\
         [[route]]\nname = \"shut\"\npath = \"/shut\"\nupstream = \"origin\"\nlimits = [\"shut\"]\n",
    );
    for algorithm in ALGORITHMS {
        let burst = match algorithm {
            "token_bucket" | "gcra" | "leaky_bucket" => format!("burst = {CAPACITY}\n"),
            _ => String::new(),
        };
        toml += &format!(
            "[limit.{algorithm}]\nkey = [\"header:x-key\"]\nalgorithm = \"{algorithm}\"\n\
             rate = \"{CAPACITY}/d\"\n{burst}{}\n",
            // a log cannot be leased
            scope.replace(
                "lease",
                if algorithm == "sliding_log" {
                    "strict"
                } else {
                    "lease"
                }
            )
        );
        for (name, cost, limits) in [
            ("one", 1, format!("\"{algorithm}\"")),
            ("three", 3, format!("\"{algorithm}\"")),
            ("all", CAPACITY, format!("\"{algorithm}\"")),
            ("shut", 1, format!("\"{algorithm}\", \"shut\"")),
            ("shut-last", 1, format!("\"shut\", \"{algorithm}\"")),
        ] {
            toml += &format!(
                "[[route]]\nname = \"{algorithm}-{name}\"\npath = \"/{algorithm}/{name}\"\n\
                 upstream = \"origin\"\nlimits = [{limits}]\ncost = {cost}\n"
            );
        }
    }
    toml
}

/// The answer to one request.
type Told = (u16, Option<String>, Option<String>);

/// Sends random requests of one key; if `between`, also requests that this limit or another
/// refuses.
fn tell(client: &mut Client, algorithm: &str, key: &str, between: bool) -> Vec<Told> {
    let key = format!("{algorithm}-{key}");
    let mut send = |path: &str| {
        let response = client.send(&Request::get(path).header("x-key", &key));
        let header = |name: &str| response.header(name).map(str::to_owned);
        (
            response.status,
            header("x-ratelimit-remaining"),
            header("x-ratelimit-limit"),
        )
    };
    assert_eq!(send("/shut").0, 200);
    let mut random = Random::new(3);
    let mut told = vec![send(&format!("/{algorithm}/one"))];
    for _ in 0..40 {
        if between {
            for name in ["all", "shut", "shut-last", "all"] {
                let refused = send(&format!("/{algorithm}/{name}"));
                assert_eq!(refused.0, 429, "{algorithm}/{name}");
            }
        }
        let name = *random.pick(&["one", "one", "three"]);
        told.push(send(&format!("/{algorithm}/{name}")));
    }
    told
}

#[test]
fn a_refusal_changes_nothing_for_a_local_limit() {
    let gateway = Gateway::with(&limits("scope = \"local\"")).start();
    let mut client = gateway.connect();
    for algorithm in ALGORITHMS {
        let alone = tell(&mut client, algorithm, "alone", false);
        let beside = tell(&mut client, algorithm, "beside", true);
        assert_eq!(alone, beside, "{algorithm}");
        assert!(alone.iter().any(|told| told.0 == 429), "{algorithm}");
    }
}

#[test]
fn a_refusal_changes_nothing_for_a_shared_limit_of_one_gateway() {
    for sync in ["strict", "lease"] {
        let redis = Redis::start();
        let redis_url = redis.url();
        let scope = format!("scope = \"global\"\nsync = \"{sync}\"");
        let gateway = Gateway::with(&format!(
            "[redis]\nurl = \"{redis_url}\"\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n{}",
            limits(&scope)
        ))
        .start();
        let mut client = gateway.connect();
        for algorithm in ALGORITHMS {
            let alone = tell(&mut client, algorithm, "alone", false);
            let beside = tell(&mut client, algorithm, "beside", true);
            if sync == "strict" || algorithm == "sliding_log" {
                assert_eq!(alone, beside, "{algorithm} {sync}");
                continue;
            }
            // leases depend on the moments of the calls: allow one request in twenty
            let admitted = |told: &[Told]| told.iter().filter(|told| told.0 == 200).count();
            let (alone, beside) = (admitted(&alone), admitted(&beside));
            assert!(
                alone.abs_diff(beside) <= 2,
                "{algorithm}: {alone} and {beside} admitted"
            );
        }
    }
}
