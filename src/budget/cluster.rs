//! Selects the server of a key: the only one, or one of a cluster's, whose slot map is fetched and
//! kept up to date.
//!
//! Every call has one key, so a cluster can redirect only with `MOVED` (use that server from now
//! on) or `ASK` (use it this once). Both mean that nothing was executed, and are followed at once.
//! Failures of its keys reveal a dead server; its slots are looked up again until another server
//! has them.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use redis::Value;

use super::redis::{
    Failure, Redirect, RedisConnection, RedisServer, RedisTarget, RedisTimeouts, Script, ScriptCall,
};

/// Slots of a cluster.
const SLOTS: usize = 16_384;
/// Most servers that are distinguished; a cluster has at most 1000.
pub(super) const MAX_SHARDS: usize = 1024;
/// Most redirects that one call follows.
const MAX_REDIRECTS: usize = 4;

/// Every server that stores some of the keys.
#[derive(Debug)]
pub(super) struct ClusterServers {
    links: RefCell<Vec<Rc<RedisConnection>>>,
    /// The connection of each slot; `None` with a single server.
    slots: Option<RefCell<Vec<u16>>>,
    /// Servers to ask for the map until some are known.
    seeds: Vec<RedisServer>,
    timeouts: RedisTimeouts,
    /// Whether a map request is in flight.
    refreshing: Cell<bool>,
}

impl ClusterServers {
    pub(super) fn new(target: &RedisTarget, timeouts: RedisTimeouts) -> ClusterServers {
        let (links, slots, seeds) = match target {
            RedisTarget::Cluster(seeds) => {
                let first = seeds.iter().take(1).cloned();
                let links =
                    first.map(|seed| RedisConnection::new(RedisTarget::One(seed), timeouts));
                (links.collect(), Some(vec![0; SLOTS]), seeds.clone())
            }
            one => (
                vec![RedisConnection::new(one.clone(), timeouts)],
                None,
                Vec::new(),
            ),
        };
        let links: Vec<RedisConnection> = links;
        ClusterServers {
            links: RefCell::new(links.into_iter().map(Rc::new).collect()),
            slots: slots.map(RefCell::new),
            seeds,
            timeouts,
            refreshing: Cell::new(false),
        }
    }

    /// Number of known servers, including those that no longer store keys.
    pub(super) fn count(&self) -> usize {
        self.links.borrow().len()
    }

    pub(super) fn link(&self, shard: usize) -> Rc<RedisConnection> {
        let links = self.links.borrow();
        Rc::clone(links.get(shard).unwrap_or(&links[0]))
    }

    /// Index of the server that stores a key.
    pub(super) fn shard_of(&self, key: &str) -> usize {
        self.slots.as_ref().map_or(0, |slots| {
            usize::from(slots.borrow()[usize::from(slot_of(key))])
        })
    }

    /// Whether the server stores any keys.
    pub(super) fn is_used(&self, shard: usize) -> bool {
        self.slots
            .as_ref()
            .is_none_or(|slots| slots.borrow().iter().any(|&of| usize::from(of) == shard))
    }

    /// A key on this server for probing it.
    pub(super) fn probe_key(&self, prefix: &str, shard: usize) -> String {
        // of n servers each owns about every nth key; without slots any key fits
        (0..SLOTS * 4)
            .map(|number| format!("{prefix}:{{probe:{number}}}"))
            .find(|key| self.shard_of(key) == shard)
            .unwrap_or_else(|| format!("{prefix}:{{probe:0}}"))
    }

    /// Runs a script on one key, on whichever server stores it.
    pub(super) async fn call(
        &self,
        script: &Script,
        mut call: ScriptCall<'_>,
    ) -> Result<Value, Failure> {
        let key = call.key;
        // in a cluster the second key may be on another server
        call.former_key = call.former_key.filter(|_| self.slots.is_none());
        let mut link = self.link(self.shard_of(key));
        let mut is_asking = false;
        for _ in 0..=MAX_REDIRECTS {
            match link.call(script, &call, is_asking).await {
                Ok(value) => return Ok(value),
                Err((failure, None)) => return Err(failure),
                Err((failure, Some(redirect))) => {
                    let Some(shard) = self.follow(&link, key, &redirect) else {
                        return Err(failure);
                    };
                    link = self.link(shard);
                    is_asking = redirect.once;
                }
            }
        }
        Err(Failure::Cluster)
    }

    /// The target of a redirect; a permanent one is remembered.
    fn follow(&self, from: &RedisConnection, key: &str, redirect: &Redirect) -> Option<usize> {
        let slots = self.slots.as_ref()?;
        let shard = self.shard_at(from.server_at(&redirect.address)?)?;
        if !redirect.once {
            slots.borrow_mut()[usize::from(slot_of(key))] = u16::try_from(shard).ok()?;
        }
        Some(shard)
    }

    /// The index of a server; adds new ones.
    fn shard_at(&self, server: RedisServer) -> Option<usize> {
        let mut links = self.links.borrow_mut();
        let address = server.address();
        if let Some(known) = links.iter().position(|link| link.address() == address) {
            return Some(known);
        }
        if links.len() == MAX_SHARDS {
            return None;
        }
        links.push(Rc::new(RedisConnection::new(
            RedisTarget::One(server),
            self.timeouts,
        )));
        Some(links.len() - 1)
    }

    /// Asks the servers in turn for the slot map; returns whether it changed. Only one request is
    /// in flight at a time.
    pub(super) async fn refresh(&self) -> bool {
        let Some(slots) = &self.slots else {
            return false;
        };
        if self.refreshing.replace(true) {
            return false;
        }
        let known: Vec<Rc<RedisConnection>> = self.links.borrow().clone();
        let seeds = self.seeds.iter().cloned();
        let seeds =
            seeds.map(|seed| Rc::new(RedisConnection::new(RedisTarget::One(seed), self.timeouts)));
        let mut changed = false;
        for link in known.into_iter().chain(seeds) {
            let Ok(map) = link.query(redis::cmd("CLUSTER").arg("SLOTS")).await else {
                continue;
            };
            if let Some(new) = self.read_map(&link, &map) {
                changed = *slots.borrow() != new;
                slots.replace(new);
                break;
            }
        }
        self.refreshing.set(false);
        changed
    }

    /// Parses a `CLUSTER SLOTS` answer: each range with its first and last slot, its master, its
    /// replicas.
    fn read_map(&self, from: &RedisConnection, answer: &Value) -> Option<Vec<u16>> {
        let Value::Array(ranges) = answer else {
            return None;
        };
        let mut map = self.slots.as_ref()?.borrow().clone();
        for range in ranges {
            let Value::Array(range) = range else {
                return None;
            };
            let [
                Value::Int(first),
                Value::Int(last),
                Value::Array(master),
                ..,
            ] = &range[..]
            else {
                return None;
            };
            let [host, Value::Int(port), ..] = &master[..] else {
                return None;
            };
            let host = match host {
                Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                Value::SimpleString(text) => text.clone(),
                // an empty host means the server that was asked
                _ => String::new(),
            };
            let server = from.server_at(&format!("{host}:{port}"))?;
            let shard = u16::try_from(self.shard_at(server)?).ok()?;
            let (first, last) = (usize::try_from(*first).ok()?, usize::try_from(*last).ok()?);
            map.get_mut(first..=last)?.fill(shard);
        }
        (!ranges.is_empty()).then_some(map)
    }
}

/// The slot of a key: the CRC-16 (XMODEM) of its first braced part.
fn slot_of(key: &str) -> u16 {
    let tag = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(tag, _)| tag)
        .filter(|tag| !tag.is_empty());
    let crc = tag.unwrap_or(key).bytes().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
            let shifted = crc << 1;
            if crc & 0x8000 == 0 {
                shifted
            } else {
                shifted ^ 0x1021
            }
        })
    });
    crc % SLOTS as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        // from the cluster specification: CRC-16 of "123456789" is 0x31C3
        assert_eq!(slot_of("123456789"), 0x31C3);
        assert_eq!(slot_of("tidegate:{123456789}"), 0x31C3);
        assert_eq!(slot_of("foo{}{bar}"), slot_of("foo{}{bar}"));
        assert_eq!(slot_of("foo"), 12_182);
    }
}
