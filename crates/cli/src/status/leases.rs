//! Leases of an agent, page after page.

use gpupool_api::lease::Lease;
use gpupool_client::{AgentClient, ClientError, LeaseQuery};

/// No more pages than this are asked for: a thousand leases each.
const PAGES: usize = 100;

/// The leases in a state (those that are not over unless said), by number.
pub(crate) async fn all_leases(
    client: &AgentClient,
    state: Option<&str>,
    owner: Option<&str>,
) -> Result<Vec<Lease>, ClientError> {
    let mut query = LeaseQuery { state: state.map(Into::into), owner: owner.map(Into::into), ..LeaseQuery::default() };
    let mut leases = Vec::new();
    for _ in 0..PAGES {
        let page = client.leases(&query).await?;
        leases.extend(page.leases);
        if page.next.is_none() {
            break;
        }
        query.after = page.next;
    }
    Ok(leases)
}
