//! An explanation as data: what `tidegate explain` prints, as text or JSON.

use std::{net::IpAddr, time::Duration};

use serde_json::{Value, json};

/// What becomes of a request, and why.
#[derive(Debug)]
pub struct Explanation {
    /// Who asks.
    pub who: Who,
    /// What for; `None` where the request is refused before that is looked at.
    pub asked: Option<Asked>,
    /// Of which moment what limits say is true: `if nothing has been spent from them yet`.
    pub when: &'static str,
    /// What each limit of its route has to do with it, in their order.
    pub limits: Vec<LimitShown>,
    /// What becomes of it.
    pub answer: Answer,
}

/// Who asks, and how that was found.
#[derive(Debug)]
pub struct Who {
    /// Who is connected.
    pub peer: IpAddr,
    /// The header that is read for the address; none where the peer is always the client.
    pub header: Option<String>,
    /// Each step towards the address.
    pub steps: Vec<String>,
    /// Whom the limits count.
    pub address: IpAddr,
    /// What was wrong with what a trusted proxy handed on.
    pub doubt: Option<&'static str>,
    /// Each source of users that was tried, in order.
    pub users: Vec<UserTried>,
    /// The verified user.
    pub user: Option<String>,
    /// The user's tier.
    pub tier: Option<String>,
    /// The user's tenant.
    pub tenant: Option<String>,
}

/// One `[[user]]` table, and what came of it.
#[derive(Debug)]
pub struct UserTried {
    /// `api_key in x-api-key`.
    pub source: String,
    /// In words.
    pub outcome: String,
}

/// What is asked for, and which route takes it.
#[derive(Debug)]
pub struct Asked {
    /// The method.
    pub method: String,
    /// The host, in its one spelling.
    pub host: String,
    /// The path as it came.
    pub path: String,
    /// The path that is matched and counted.
    pub matched_path: String,
    /// The path that is sent on.
    pub sent_path: String,
    /// The route that takes it.
    pub route: Option<RouteShown>,
    /// Other routes for this host and path: less specific, or for other methods.
    pub also: Vec<RouteShown>,
    /// What the parameters of the route's path stand for.
    pub params: Vec<(String, String)>,
    /// Units that it takes from each limit.
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

/// What one limit has to do with the request.
#[derive(Debug)]
pub struct LimitShown {
    /// Its name.
    pub name: String,
    /// How it counts.
    pub algorithm: &'static str,
    /// `global` where gateways share it, else `local`.
    pub scope: &'static str,
    /// How it acts: `enforce`, `shadow`, `tag` or `off`.
    pub mode: &'static str,
    /// What its key is made of, as configured.
    pub parts: Vec<String>,
    /// The key as access lines show it: readable where it is an address or a user, hashed where it may be a secret.
    pub key: String,
    /// `100/s, burst 200`; empty where the limit is not met.
    pub quota: String,
    /// Why that quota; empty where there is only one.
    pub because: String,
    /// How it stands after the decision.
    pub standing: Option<Stands>,
    /// What it does.
    pub outcome: Outcome,
}

/// How a limit stands.
#[derive(Clone, Copy, Debug)]
pub struct Stands {
    /// Units left.
    pub remaining: u64,
    /// The most that there can be.
    pub capacity: u64,
}

/// What a limit does with the request.
#[derive(Debug)]
pub enum Outcome {
    /// It lets it pass.
    Admitted,
    /// It lets it pass, and charges it if the answer has one of these statuses.
    CountsLater(Vec<u16>),
    /// It holds it until its turn.
    Delayed(Duration),
    /// It stops it.
    Rejected {
        /// No wait helps.
        never: bool,
        /// When it would pass.
        retry_after: Option<Duration>,
    },
    /// It lacks a part of the key: 400.
    Unkeyed,
    /// It lets it pass, and tells the upstream.
    Tagged,
    /// It is in shadow.
    LookedOn {
        /// What it would have done.
        would_reject: bool,
    },
    /// Nothing, for this reason.
    NotMet(String),
}

/// What becomes of the request.
#[derive(Debug)]
pub enum Answer {
    /// It is sent on.
    Forwarded(Forwarded),
    /// 429.
    Denied {
        /// When it would pass.
        retry_after: Option<Duration>,
    },
    /// The page with the caller's own quotas.
    OwnQuotas,
    /// Another answer of the gateway's own.
    Refused(Refused),
}

/// An answer of the gateway's own.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// Its status.
    pub status: u16,
    /// Why, for people.
    pub sentence: &'static str,
}

/// Where the request is sent, and what is changed in its head.
#[derive(Debug)]
pub struct Forwarded {
    /// The upstream.
    pub upstream: String,
    /// Its servers.
    pub servers: Vec<String>,
    /// How long it is held before.
    pub delay: Duration,
    /// Fields that are not as the client sent them; a value that may be secret is `…`.
    pub sets: Vec<(String, String)>,
    /// Fields of the client's that are not sent on.
    pub removes: Vec<String>,
}

impl Outcome {
    /// A word for programs: as in `tidegate_decisions_total`, where there is one.
    pub fn word(&self) -> &'static str {
        match self {
            Outcome::Admitted | Outcome::CountsLater(_) => "admitted",
            Outcome::LookedOn {
                would_reject: false,
            } => "admitted",
            Outcome::LookedOn { would_reject: true } => "shadow_rejected",
            Outcome::Delayed(_) => "delayed",
            Outcome::Rejected { .. } => "rejected",
            Outcome::Unkeyed => "unkeyed",
            Outcome::Tagged => "tagged",
            Outcome::NotMet(_) => "not_met",
        }
    }
}

impl Explanation {
    /// The most bytes of a text that is remembered, and the most texts of a list.
    pub const CLIPPED_TEXTS: (usize, usize) = (256, 16);

    /// Of nobody who asks for nothing.
    pub fn nothing() -> Explanation {
        let nobody = IpAddr::from([0, 0, 0, 0]);
        Explanation {
            who: Who {
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
            answer: Answer::Refused(Refused {
                status: 0,
                sentence: "",
            }),
        }
    }

    /// Cuts what clients may make long, so that it can be remembered.
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
        if let Answer::Forwarded(forwarded) = &mut self.answer {
            clip_all(&mut forwarded.sets, |(name, value)| {
                clip(name);
                clip(value);
            });
            clip_all(&mut forwarded.removes, clip);
            clip_all(&mut forwarded.servers, clip);
        }
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        json!({
            "client": self.who.json(),
            "request": self.asked.as_ref().map(Asked::json),
            "when": self.when,
            "limits": self.limits.iter().map(LimitShown::json).collect::<Vec<_>>(),
            "answer": self.answer.json(),
        })
    }
}

impl Who {
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

impl Asked {
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
            Outcome::NotMet(why) => shown["why"] = json!(why),
            Outcome::Admitted | Outcome::Unkeyed | Outcome::Tagged | Outcome::LookedOn { .. } => {}
        }
        shown
    }
}

impl Answer {
    fn json(&self) -> Value {
        match self {
            Answer::Forwarded(forwarded) => {
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
            Answer::Denied { retry_after } => json!({
                "forwarded": false,
                "status": 429,
                "retry_after": seconds(*retry_after),
            }),
            Answer::OwnQuotas => json!({ "outcome": "own_quotas", "status": 200 }),
            Answer::Refused(refused) => json!({
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

/// Whole seconds, as `Retry-After` tells them.
fn seconds(wait: Option<Duration>) -> Value {
    wait.map_or(Value::Null, |wait| json!(whole_seconds(wait)))
}

/// Rounded up, and at least one.
pub fn whole_seconds(wait: Duration) -> u64 {
    let whole = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    whole.max(1)
}
