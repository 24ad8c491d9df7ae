"""`halfstep rehearse`: predicted troubles and the proposed policy, as text and as a page."""
