"""What parts over ranks share: the group, agreement between ranks, the rows they send."""
