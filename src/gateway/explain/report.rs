//! An explanation as data; `tidegate explain` prints it as text or JSON.

use std::{net::IpAddr, time::Duration};

use serde_json::{Value, json};

/// The outcome of a request, with the reasons.
#[derive(Debug)]
pub struct Explanation {
    /// The client.
    pub who: ClientShown,
    /// The target; `None` if the request is refused before routing.
    pub asked: Option<ExplainedRequest>,
    /// The assumed state of the limits, such as `if nothing has been spent from them yet`.
    pub when: &'static str,
    /// Each limit of the route, in order.
    pub limits: Vec<LimitShown>,
    /// The outcome.
    pub answer: ExplainedOutcome,
}

/// The client, and how it was identified.
#[derive(Debug)]
pub struct ClientShown {
    /// The connection's peer.
    pub peer: IpAddr,
    /// The header that carries the client address; `None` if the peer is always the client.
    pub header: Option<String>,
    /// The steps from the peer to the client address.
    pub steps: Vec<String>,
    /// The address that limits count.
    pub address: IpAddr,
    /// The fault in the address from a trusted proxy.
    pub doubt: Option<&'static str>,
    /// The user sources tried, in order.
    pub users: Vec<UserSourceShown>,
    /// The verified user.
    pub user: Option<String>,
    /// The user's tier.
    pub tier: Option<String>,
    /// The user's tenant.
    pub tenant: Option<String>,
}

/// One `[[user]]` table, with its outcome.
#[derive(Debug)]
pub struct UserSourceShown {
    /// `api_key in x-api-key`.
    pub source: String,
    /// The outcome in words.
    pub outcome: String,
}

/// The target of a request, and its route.
#[derive(Debug)]
pub struct ExplainedRequest {
    /// The method.
    pub method: String,
    /// The normalised host.
    pub host: String,
    /// The path as received.
    pub path: String,
    /// The normalised path, used for matching and counting.
    pub matched_path: String,
    /// The path sent to the upstream.
    pub sent_path: String,
    /// The matching route.
    pub route: Option<RouteShown>,
    /// Other routes for this host and path: less specific, or with other methods.
    pub also: Vec<RouteShown>,
    /// The values of the route's path parameters.
    pub params: Vec<(String, String)>,
    /// Units charged to each limit.
    pub cost: u64,
}

/// A route.
#[derive(Debug)]
pub struct RouteShown {
    /// Its name.
    pub name: String,
    /// `POST api.example.com/login`.
    pub pattern: String,
}

/// One limit's effect on the request.
#[derive(Debug)]
pub struct LimitShown {
    /// Its name.
    pub name: String,
    /// The algorithm.
    pub algorithm: &'static str,
    /// `global` if gateways share the limit, else `local`.
    pub scope: &'static str,
    /// The mode: `enforce`, `shadow`, `tag` or `off`.
    pub mode: &'static str,
    /// The parts of the key, as configured.
    pub parts: Vec<String>,
    /// The key as access lines show it: addresses and users readable, possible secrets hashed.
    pub key: String,
    /// The quota, such as `100/s, burst 200`; empty if the limit does not apply.
    pub quota: String,
    /// Why that quota; empty if there is only one.
    pub because: String,
    /// The standing after the decision.
    pub standing: Option<StandingShown>,
    /// The limit's effect.
    pub outcome: Outcome,
}

/// The standing of a limit.
#[derive(Clone, Copy, Debug)]
pub struct StandingShown {
    /// Units left.
    pub remaining: u64,
    /// Capacity in units.
    pub capacity: u64,
}

/// The effect of a limit on the request.
#[derive(Debug)]
pub enum Outcome {
    /// Admits it.
    Admitted,
    /// Admits it, and charges it if the answer has one of these statuses.
    CountsLater(Vec<u16>),
    /// Delays it.
    Delayed(Duration),
    /// Rejects it.
    Rejected {
        /// No retry can succeed.
        never: bool,
        /// Time until a retry can succeed.
        retry_after: Option<Duration>,
    },
    /// The request lacks a part of the key: 400.
    Unkeyed,
    /// Admits it, and tells the upstream that it is over the limit.
    Tagged,
    /// Observes it in shadow mode.
    Observed {
        /// Whether the limit would reject the request.
        would_reject: bool,
    },
    /// The limit does not apply, for this reason.
    NotApplied(String),
}

/// The gateway's answer.
#[derive(Debug)]
pub enum ExplainedOutcome {
    /// The request is forwarded.
    Forwarded(Forwarded),
    /// 429.
    Denied {
        /// Time until a retry can succeed.
        retry_after: Option<Duration>,
    },
    /// The status page with the caller's own quotas.
    OwnQuotas,
    /// Another refusal.
    Refused(Refused),
}

/// A refusal by the gateway.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// Its status.
    pub status: u16,
    /// The reason, for people.
    pub sentence: &'static str,
}

/// The upstream of a forwarded request, and the changes to its head.
#[derive(Debug)]
pub struct Forwarded {
    /// The upstream.
    pub upstream: String,
    /// Its servers.
    pub servers: Vec<String>,
    /// The delay before forwarding.
    pub delay: Duration,
    /// Fields that the gateway sets or changes. Values that may be secret are shown as `…`.
    pub sets: Vec<(String, String)>,
    /// Client fields that are not forwarded.
    pub removes: Vec<String>,
}

impl Outcome {
    /// A stable word for programs, as in `tidegate_decisions_total` where that has one.
    pub fn word(&self) -> &'static str {
        match self {
            Outcome::Admitted | Outcome::CountsLater(_) => "admitted",
            Outcome::Observed {
                would_reject: false,
            } => "admitted",
            Outcome::Observed { would_reject: true } => "shadow_rejected",
            Outcome::Delayed(_) => "delayed",
            Outcome::Rejected { .. } => "rejected",
            Outcome::Unkeyed => "unkeyed",
            Outcome::Tagged => "tagged",
            Outcome::NotApplied(_) => "not_applied",
        }
    }
}

impl Explanation {
    /// The bounds of a logged explanation: bytes per text, texts per list.
    pub const CLIPPED_TEXTS: (usize, usize) = (256, 16);

    /// An empty explanation.
    pub fn nothing() -> Explanation {
        let nobody = IpAddr::from([0, 0, 0, 0]);
        Explanation {
            who: ClientShown {
                peer: nobody,
                header: None,
                steps: Vec::new(),
                address: nobody,
                doubt: None,
                users: Vec::new(),
                user: None,
                tier: None,
                tenant: None,
            },
            asked: None,
            when: "",
            limits: Vec::new(),
            answer: ExplainedOutcome::Refused(Refused {
                status: 0,
                sentence: "",
            }),
        }
    }

    /// Clips all texts that clients can make long, so that the explanation can be kept.
    pub fn clip(&mut self) {
        let who = &mut self.who;
        clip_all(&mut who.steps, clip);
        let named = [&mut who.user, &mut who.tier, &mut who.tenant];
        named.into_iter().flatten().for_each(clip);
        if let Some(asked) = &mut self.asked {
            let texts = [
                &mut asked.method,
                &mut asked.host,
                &mut asked.path,
                &mut asked.matched_path,
                &mut asked.sent_path,
            ];
            texts.into_iter().for_each(clip);
            clip_all(&mut asked.params, |(_, value)| clip(value));
            clip_all(&mut asked.also, |_| ());
        }
        self.limits
            .iter_mut()
            .for_each(|limit| clip(&mut limit.key));
        if let ExplainedOutcome::Forwarded(forwarded) = &mut self.answer {
            clip_all(&mut forwarded.sets, |(name, value)| {
                clip(name);
                clip(value);
            });
            clip_all(&mut forwarded.removes, clip);
            clip_all(&mut forwarded.servers, clip);
        }
    }

    /// The explanation as JSON.
    pub fn json(&self) -> Value {
        json!({
            "client": self.who.json(),
            "request": self.asked.as_ref().map(ExplainedRequest::json),
            "when": self.when,
            "limits": self.limits.iter().map(LimitShown::json).collect::<Vec<_>>(),
            "answer": self.answer.json(),
        })
    }
}

impl ClientShown {
    fn json(&self) -> Value {
        let users: Vec<Value> = self
            .users
            .iter()
            .map(|tried| json!({ "source": tried.source, "outcome": tried.outcome }))
            .collect();
        json!({
            "peer": self.peer.to_string(),
            "header": self.header,
            "steps": self.steps,
            "address": self.address.to_string(),
            "doubt": self.doubt,
            "credentials": users,
            "user": self.user,
            "tier": self.tier,
            "tenant": self.tenant,
        })
    }
}

impl ExplainedRequest {
    fn json(&self) -> Value {
        let route = |route: &RouteShown| json!({ "name": route.name, "pattern": route.pattern });
        let params: serde_json::Map<String, Value> = self
            .params
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        json!({
            "method": self.method,
            "host": self.host,
            "path": self.path,
            "matched_path": self.matched_path,
            "sent_path": self.sent_path,
            "route": self.route.as_ref().map(route),
            "also": self.also.iter().map(route).collect::<Vec<_>>(),
            "params": params,
            "cost": self.cost,
        })
    }
}

impl LimitShown {
    fn json(&self) -> Value {
        let mut shown = json!({
            "name": self.name,
            "algorithm": self.algorithm,
            "scope": self.scope,
            "mode": self.mode,
            "key_parts": self.parts,
            "key": self.key,
            "quota": self.quota,
            "because": self.because,
            "outcome": self.outcome.word(),
            "remaining": self.standing.map(|standing| standing.remaining),
            "capacity": self.standing.map(|standing| standing.capacity),
        });
        match &self.outcome {
            Outcome::CountsLater(statuses) => shown["count_status"] = json!(statuses),
            Outcome::Delayed(delay) => shown["delay_seconds"] = json!(delay.as_secs_f64()),
            Outcome::Rejected { retry_after, .. } => shown["retry_after"] = seconds(*retry_after),
            Outcome::NotApplied(why) => shown["why"] = json!(why),
            Outcome::Admitted | Outcome::Unkeyed | Outcome::Tagged | Outcome::Observed { .. } => {}
        }
        shown
    }
}

impl ExplainedOutcome {
    fn json(&self) -> Value {
        match self {
            ExplainedOutcome::Forwarded(forwarded) => {
                let sets: Vec<Value> = forwarded
                    .sets
                    .iter()
                    .map(|(name, value)| json!({ "name": name, "value": value }))
                    .collect();
                json!({
                    "forwarded": true,
                    "upstream": forwarded.upstream,
                    "servers": forwarded.servers,
                    "delay_seconds": forwarded.delay.as_secs_f64(),
                    "sets": sets,
                    "removes": forwarded.removes,
                })
            }
            ExplainedOutcome::Denied { retry_after } => json!({
                "forwarded": false,
                "status": 429,
                "retry_after": seconds(*retry_after),
            }),
            ExplainedOutcome::OwnQuotas => json!({ "outcome": "own_quotas", "status": 200 }),
            ExplainedOutcome::Refused(refused) => json!({
                "forwarded": false,
                "status": refused.status,
                "why": refused.sentence,
            }),
        }
    }
}

fn clip(text: &mut String) {
    let (most, _) = Explanation::CLIPPED_TEXTS;
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.push('…');
    }
    text.shrink_to_fit();
}

fn clip_all<T>(list: &mut Vec<T>, clip: impl Fn(&mut T)) {
    let (_, most) = Explanation::CLIPPED_TEXTS;
    list.truncate(most);
    list.shrink_to_fit();
    list.iter_mut().for_each(clip);
}

/// Whole seconds, as in `Retry-After`.
fn seconds(wait: Option<Duration>) -> Value {
    wait.map_or(Value::Null, |wait| json!(whole_seconds(wait)))
}

/// Rounds up; at least one.
pub fn whole_seconds(wait: Duration) -> u64 {
    let whole = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    whole.max(1)
}
