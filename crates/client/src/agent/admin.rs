//! What administrators do: take back, cordon, hand out tokens, and break simulated devices.

use gpupool_api::lease::{Lease, RevokeBody};
use gpupool_api::pool::Device;
use gpupool_api::simulate::{FaultBody, Faults};
use gpupool_api::tokens::{NewToken, TokenCreated, Tokens};

use super::call::Call;
use crate::{AgentClient, ClientError};

impl AgentClient {
    /// Takes a lease back, at once or after so many seconds of grace.
    pub async fn revoke(&self, lease: u64, grace_secs: f64) -> Result<Lease, ClientError> {
        self.ask(&Call::post(format!("/v1/leases/{lease}/revoke"), &RevokeBody { grace_secs })).await
    }

    /// Stops new work on a device.
    pub async fn cordon(&self, gpu_id: u32) -> Result<Device, ClientError> {
        self.ask(&Call::post(format!("/v1/devices/{gpu_id}/cordon"), &serde_json::json!({}))).await
    }

    /// Allows new work on a device again.
    pub async fn uncordon(&self, gpu_id: u32) -> Result<Device, ClientError> {
        self.ask(&Call::post(format!("/v1/devices/{gpu_id}/uncordon"), &serde_json::json!({}))).await
    }

    /// Makes a token. Not repeated after a broken connection: it might be made twice.
    pub async fn create_token(&self, token: &NewToken) -> Result<TokenCreated, ClientError> {
        self.ask(&Call::post("/v1/tokens", token).only_once()).await
    }

    /// Every token, without its secret.
    pub async fn tokens(&self) -> Result<Tokens, ClientError> {
        self.ask(&Call::get("/v1/tokens")).await
    }

    /// Makes a token worthless.
    pub async fn revoke_token(&self, token: u64) -> Result<(), ClientError> {
        self.tell(&Call::delete(format!("/v1/tokens/{token}")).only_once()).await
    }

    /// The faults of simulated devices.
    pub async fn faults(&self) -> Result<Faults, ClientError> {
        self.ask(&Call::get("/v1/simulate/faults")).await
    }

    /// Breaks a simulated device, or mends it; answers with what is wrong now.
    pub async fn set_fault(&self, fault: &FaultBody) -> Result<Faults, ClientError> {
        self.ask(&Call::post("/v1/simulate/faults", fault)).await
    }

    /// Mends all simulated devices.
    pub async fn clear_faults(&self) -> Result<Faults, ClientError> {
        self.set_fault(&FaultBody { gpu_id: None, fault: serde_json::Value::Null }).await
    }
}
