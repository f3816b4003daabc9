//! Load balancing: chooses a server among the available ones.
//!
//! - `round_robin`: in turn, per worker.
//! - `least_requests`: of two random servers, the one with fewer requests in flight across all
//!   workers (power of two choices). The load is nearly as even as with a full comparison, without
//!   herding on the server that looks best. Ties alternate.
//! - `hash:ip`, `hash:user`: the server with the highest score for the client (rendezvous hashing,
//!   Thaler and Ravishankar 1998). Removing or ejecting a server moves only its own clients. Adding
//!   one takes 1/n of each other server's clients. Ketama and Maglev need a table rebuilt on every
//!   change; here a request costs one multiplication per server. All gateways agree.
//!
//! Never allocates or locks.

use std::{cell::Cell, hash::Hasher as _, net::IpAddr};

use siphasher::sip::SipHasher13;

use crate::identity::{Client, Prefixes};

/// Load-balancing policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// The less loaded of two random servers.
    #[default]
    LeastRequests,
    /// In turn.
    RoundRobin,
    /// The same server for each address (an IPv6 client is its /64).
    HashIp,
    /// The same server for each user, or for each address if anonymous.
    HashUser,
}

/// The servers to choose from.
pub(super) trait Candidates {
    fn count(&self) -> usize;
    fn may_take(&self, server: usize) -> bool;
    fn outstanding(&self, server: usize) -> usize;
    /// Position in the hash space, from [`seed`].
    fn seed(&self, server: usize) -> u64;
}

/// The balancing state of one worker.
#[derive(Debug)]
pub(super) struct Balancer {
    balance: Balance,
    turn: Cell<usize>,
    random: Cell<u64>,
}

impl Balancer {
    /// `random` must differ between workers, so that they choose differently.
    pub(super) fn new(balance: Balance, random: u64) -> Self {
        Self {
            balance,
            turn: Cell::new(0),
            random: Cell::new(random | 1),
        }
    }

    /// Chooses an available server; `None` if there is none.
    pub(super) fn choose(&self, among: &impl Candidates, client: &Client<'_>) -> Option<usize> {
        match self.balance {
            Balance::RoundRobin => {
                let first = self.next_turn();
                (0..among.count())
                    .map(|step| first.wrapping_add(step) % among.count())
                    .find(|&server| among.may_take(server))
                    .inspect(|&server| self.turn.set(server + 1))
            }
            Balance::LeastRequests => self.less_loaded_of_two(among),
            Balance::HashIp => highest(among, hash_of_address(client.address)),
            Balance::HashUser => highest(
                among,
                client
                    .user
                    .map_or_else(|| hash_of_address(client.address), hash_of_user),
            ),
        }
    }

    /// Chooses for a retry. It does not advance the turn, which the failed server has used.
    pub(super) fn choose_instead(
        &self,
        among: &impl Candidates,
        client: &Client<'_>,
    ) -> Option<usize> {
        let turn = self.turn.get();
        let chosen = self.choose(among, client);
        self.turn.set(turn);
        chosen
    }

    fn less_loaded_of_two(&self, among: &impl Candidates) -> Option<usize> {
        let able = || (0..among.count()).filter(|&server| among.may_take(server));
        let count = able().count();
        if count < 2 {
            return able().next();
        }
        let one = self.below(count);
        let other = (one + 1 + self.below(count - 1)) % count;
        let one_server = able().nth(one.min(other))?;
        // another worker may have ejected a server since the count
        let Some(other_server) = able().nth(one.max(other)) else {
            return Some(one_server);
        };
        let (one_has, other_has) = (
            among.outstanding(one_server),
            among.outstanding(other_server),
        );
        let takes_first = match one_has.cmp(&other_has) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal => self.next_turn().is_multiple_of(2),
            std::cmp::Ordering::Greater => false,
        };
        Some(if takes_first {
            one_server
        } else {
            other_server
        })
    }

    fn next_turn(&self) -> usize {
        let turn = self.turn.get();
        self.turn.set(turn.wrapping_add(1));
        turn
    }

    /// A number below `bound`, by xorshift: it must be spread evenly, not secret.
    fn below(&self, bound: usize) -> usize {
        let mut random = self.random.get();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        self.random.set(random);
        // below `bound`, so it fits
        ((u128::from(random) * bound as u128) >> 64) as usize
    }
}

fn highest(among: &impl Candidates, key: u64) -> Option<usize> {
    (0..among.count())
        .filter(|&server| among.may_take(server))
        .max_by_key(|&server| mix(key ^ among.seed(server)))
}

/// Position of a server in the hash space, from its name in the configuration.
pub(super) fn seed(server: &str) -> u64 {
    hash(b's', server.as_bytes())
}

fn hash_of_address(address: IpAddr) -> u64 {
    match Prefixes::default().aggregate(address).network() {
        IpAddr::V4(address) => hash(b'4', &address.octets()),
        IpAddr::V6(address) => hash(b'6', &address.octets()),
    }
}

fn hash_of_user(user: &str) -> u64 {
    hash(b'u', user.as_bytes())
}

/// Identical in every process, as gateways must agree. Not keyed: an attacker gains nothing by
/// choosing a server.
fn hash(kind: u8, bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(0, 0);
    hasher.write_u8(kind);
    hasher.write(bytes);
    hasher.finish()
}

/// The finalizer of SplitMix64: every input bit affects every output bit.
fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct ServerSet {
        names: Vec<String>,
        able: Vec<bool>,
        loads: Vec<usize>,
    }

    impl ServerSet {
        fn new(count: usize) -> Self {
            Self {
                names: (0..count)
                    .map(|n| format!("http://10.0.0.{n}:80"))
                    .collect(),
                able: vec![true; count],
                loads: vec![0; count],
            }
        }
    }

    impl Candidates for ServerSet {
        fn count(&self) -> usize {
            self.names.len()
        }
        fn may_take(&self, server: usize) -> bool {
            self.able[server]
        }
        fn outstanding(&self, server: usize) -> usize {
            self.loads[server]
        }
        fn seed(&self, server: usize) -> u64 {
            seed(&self.names[server])
        }
    }

    fn client(n: u32) -> Client<'static> {
        Client::anonymous(IpAddr::V4((0x0a00_0000 + n).into()))
    }

    fn chosen(balance: Balance, servers: &ServerSet, count: u32) -> Vec<Option<usize>> {
        let balancer = Balancer::new(balance, 7);
        (0..count)
            .map(|n| balancer.choose(servers, &client(n)))
            .collect()
    }

    const EVERY: [Balance; 4] = [
        Balance::RoundRobin,
        Balance::LeastRequests,
        Balance::HashIp,
        Balance::HashUser,
    ];

    #[test]
    fn every_balance_spreads_requests_over_the_servers_that_may_take_them() {
        let mut servers = ServerSet::new(5);
        servers.able[2] = false;
        for balance in EVERY {
            let chosen = chosen(balance, &servers, 4_000);
            for server in [0, 1, 3, 4] {
                let share = chosen.iter().filter(|&&s| s == Some(server)).count();
                assert!((850..=1_150).contains(&share), "{balance:?}: {share}");
            }
        }
        servers.able = vec![false; 5];
        for balance in EVERY {
            assert_eq!(chosen(balance, &servers, 1), [None]);
        }
    }

    #[test]
    fn equal_servers_take_turns() {
        for balance in [Balance::RoundRobin, Balance::LeastRequests] {
            let turns = chosen(balance, &ServerSet::new(2), 4);
            assert_eq!(turns, [Some(0), Some(1), Some(0), Some(1)], "{balance:?}");
        }
    }

    #[test]
    fn a_turn_passes_over_a_server_that_is_out_to_the_next_and_goes_on_from_there() {
        let mut servers = ServerSet::new(3);
        servers.able[0] = false;
        let turns = chosen(Balance::RoundRobin, &servers, 4);
        assert_eq!(turns, [Some(1), Some(2), Some(1), Some(2)]);
    }

    #[test]
    fn the_most_loaded_server_gets_nothing_and_the_least_loaded_the_most() {
        let mut servers = ServerSet::new(3);
        servers.loads = vec![0, 5, 9];
        let chosen = chosen(Balance::LeastRequests, &servers, 3_000);
        let share = |server| chosen.iter().filter(|&&s| s == Some(server)).count();
        assert_eq!(share(2), 0, "it never beats another");
        assert!((1_850..=2_150).contains(&share(0)), "{}", share(0));
    }

    #[test]
    fn a_client_keeps_its_server() {
        let servers = ServerSet::new(7);
        let balancer = Balancer::new(Balance::HashUser, 1);
        for n in 0..100 {
            let user = format!("user {n}");
            let from = |address| Client {
                user: Some(&user),
                ..client(address)
            };
            let first = balancer.choose(&servers, &from(1));
            assert_eq!(balancer.choose(&servers, &from(2)), first, "wherever it is");
        }
        let in_a_network =
            |host: u128| Client::anonymous(IpAddr::V6(((0x2001_0db8_u128 << 96) | host).into()));
        let balancer = Balancer::new(Balance::HashIp, 1);
        let home = balancer.choose(&servers, &in_a_network(1));
        assert_eq!(balancer.choose(&servers, &in_a_network(0xffff)), home);
    }

    #[test]
    fn a_server_that_leaves_moves_only_its_own_clients_and_spreads_them() {
        let mut servers = ServerSet::new(10);
        let before = chosen(Balance::HashIp, &servers, 10_000);
        servers.able[4] = false;
        let after = chosen(Balance::HashIp, &servers, 10_000);
        let mut heirs = [0; 10];
        for (before, after) in before.iter().zip(&after) {
            match before {
                Some(4) => heirs[after.expect("a server")] += 1,
                _ => assert_eq!(before, after),
            }
        }
        assert_eq!(heirs[4], 0);
        let others = heirs.iter().enumerate().filter(|(n, _)| *n != 4);
        assert!(
            others.clone().all(|(_, moved)| (60..=170).contains(moved)),
            "{heirs:?}"
        );
    }

    #[test]
    fn a_server_that_is_added_takes_its_share_and_moves_nobody_else() {
        let before = chosen(Balance::HashIp, &ServerSet::new(9), 10_000);
        let after = chosen(Balance::HashIp, &ServerSet::new(10), 10_000);
        let moved = before.iter().zip(&after).filter(|(b, a)| b != a);
        assert!(moved.clone().all(|(_, after)| *after == Some(9)));
        assert!((850..=1_150).contains(&moved.count()));
    }
}
