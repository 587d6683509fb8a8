"""All pages and actions of the dashboard."""

from fastapi import APIRouter

from server.dashboard import actions, audit_log, creation, downloads, federation, overview, sign_in

router = APIRouter(include_in_schema=False)
for part in (sign_in, overview, creation, federation, downloads, actions, audit_log):
    router.include_router(part.router)
